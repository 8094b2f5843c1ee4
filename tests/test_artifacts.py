"""What a run shows in Prefect's UI, and that it goes on where it can't."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prefect import flow, runtime
from prefect.client.base import PrefectHttpxSyncClient, PrefectResponse
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import Artifact

import flows.verify as verify_flow
from flows.parameters import Verification
from layertap.errors import IntegrityError
from layertap.report import Report
from layertap.store import Store
from tasks.artifacts import PROGRESS, SHARDS, ProgressBoard, show_plan
from tasks.speed import LANE, SPEED, LaneBoard, SpeedBoard
from tests.stored import new_catalog
from tests.test_dispatch import seen
from tests.test_shards import lane_log

pytestmark = pytest.mark.usefixtures("prefect_server")


def in_a_run(show: Callable[[], None]) -> None:
    @flow(persist_result=False)
    def run() -> None:
        show()

    run()


def shown() -> dict[str, Artifact]:
    """What this flow run shows, under its keys."""
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[runtime.flow_run.id]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(flow_run_filter=of_run)
    by_key = {str(artifact.key): artifact for artifact in found}
    assert len(by_key) == len(found), "each once"
    return by_key


def nobody_there(_: PrefectHttpxSyncClient, request: httpx.Request, **__: Any) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


def a_proxy_without_it(_: PrefectHttpxSyncClient, request: httpx.Request, **__: Any) -> httpx.Response:
    answer = PrefectResponse.from_httpx_response(httpx.Response(404, request=request))
    return answer.raise_for_status()


@pytest.mark.parametrize("instead", [nobody_there, a_proxy_without_it])
def test_a_server_that_is_away_is_shown_the_run_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, instead: Callable[..., httpx.Response]
) -> None:
    store = Store.folder(tmp_path)

    def show() -> None:
        progress, lane, picture = ProgressBoard(), LaneBoard(), SpeedBoard(store, "plan")
        log = lane_log(store)

        def look() -> None:
            progress.show(seen(), last=True)
            lane.show(log.note(100))
            lane.conclude(log.note(200))
            picture.show(last=True)

        with monkeypatch.context() as patch:
            patch.setattr(PrefectHttpxSyncClient, "send", instead)
            show_plan([("rows", "3")], "s3://bucket/root")
            progress.begin()
            look()
        assert not shown()
        look()
        first = shown()
        assert first.keys() == {PROGRESS, SHARDS, LANE, SPEED}
        with monkeypatch.context() as patch:
            patch.setattr(PrefectHttpxSyncClient, "send", instead)
            look()
        look()
        assert {key: artifact.id for key, artifact in shown().items()} == {
            key: artifact.id for key, artifact in first.items()
        }

    in_a_run(show)


@pytest.mark.parametrize("instead", [nobody_there, a_proxy_without_it])
def test_verify_fails_with_its_findings_though_they_can_not_be_shown(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, instead: Callable[..., httpx.Response]
) -> None:
    new_catalog(folder_store).store.put("plans/p/plan.json", b"damaged")
    monkeypatch.setattr(verify_flow, "open_store", lambda storage, root: folder_store)

    def show() -> None:
        with monkeypatch.context() as patch, pytest.raises(IntegrityError, match="plans/p/plan.json"):
            patch.setattr(PrefectHttpxSyncClient, "send", instead)
            verify_flow.verify.fn(Verification(root="model/run"))

    in_a_run(show)


def test_what_somebody_deletes_is_made_anew(tmp_path: Path) -> None:
    store = Store.folder(tmp_path)

    def show() -> None:
        progress, lane, picture = ProgressBoard(), LaneBoard(), SpeedBoard(store, "plan")
        log = lane_log(store)
        for num_tokens in (100, 200, 300):
            progress.show(seen(), last=True)
            lane.show(log.note(num_tokens))
            lane.conclude(log.note(num_tokens))
            picture.show(last=True)
            found = shown()
            assert found.keys() == {PROGRESS, SHARDS, LANE, SPEED}
            assert f"{num_tokens} tokens" in str(found[LANE].data)
            if num_tokens == 100:
                with get_client(sync_client=True) as client:
                    for artifact in found.values():
                        client.delete_artifact(artifact.id)

    in_a_run(show)


def test_nothing_says_that_a_run_waits_once_it_is_through() -> None:
    def show() -> None:
        board = ProgressBoard()
        board.show(seen(), last=True)
        progress = shown()[PROGRESS].description
        board.conclude(cast(Report, "all stored"))
        assert shown()[PROGRESS].description == progress
        board._progress_due = 0.0
        board.show_waiting("waiting for the store")
        assert shown()[PROGRESS].description == "waiting for the store"
        board.conclude(cast(Report, "all stored"))
        assert shown()[PROGRESS].description == "all stored"

    in_a_run(show)
