"""The shard task under a real Prefect engine, with a lane whose faults are injected."""

import base64
import threading
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from prefect import flow, runtime
from prefect.artifacts import MarkdownArtifact
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.orchestration import get_client
from prefect.filesystems import LocalFileSystem, WritableFileSystem

from layertap.catalog import Claim, Outcome
from layertap.errors import ClaimLostError, IntegrityError, StoreError
from layertap.lane import Lane
from layertap.lane_log import LaneLog
from layertap.progress import Clock
from layertap.records import now
from layertap.store import Store
from tasks import speed
from tasks.results import ShardResults
from tasks.shards import extract_shard, submit_shard
from tasks.speed import LANE, SPEED, LaneBoard, SpeedBoard
from tasks.storage import load_block, store_in

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def storage(tmp_path: Path) -> WritableFileSystem:
    """Results of the root in a folder of a storage block."""
    LocalFileSystem(basepath=str(tmp_path)).save("results", overwrite=True)
    block = load_block("local-file-system/results")
    return ShardResults.of(block, store_in(block, "root"), "root")


OUTCOME = Outcome(
    kind="committed",
    shard=12,
    claim=1,
    attempt="a" * 32,
    lane="lane-0",
    host="host",
    device="CPU",
    files=[],
    index={},
    num_rows=3,
    num_tokens=30,
    nbytes=300,
    refused=[],
    seconds={},
    num_splits=0,
    environment={},
    started_at="",
    ended_at="",
)


class FaultyLane:
    """Raises each of its errors once, then commits."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    def extract(self, claim: Claim) -> Outcome:
        self.num_calls += 1
        self.task_run_name = runtime.task_run.name
        if self.errors:
            raise self.errors.pop(0)
        return OUTCOME


def run(lane: FaultyLane, storage: WritableFileSystem, *, number: int) -> Any:
    """What the future gives, or raises, inside the lane's flow."""
    claim = Claim(plan_id="plan", shard=12, number=number, lane="lane-0", token="t")

    @flow(persist_result=False)
    def lane_flow() -> Any:
        future = submit_shard(cast(Lane, lane), claim, storage=storage, root="root")
        try:
            return future.result()
        except Exception as error:
            return error

    return lane_flow()


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_shard, "retry_delay_seconds", 0.0)


def test_a_failure_gets_another_try_and_the_manifest_is_kept_as_json(
    storage: WritableFileSystem, tmp_path: Path
) -> None:
    lane = FaultyLane(IntegrityError("a row arrived damaged"))
    manifest = run(lane, storage, number=1)
    assert (manifest["shard"], manifest["attempt"], manifest["num_tokens"]) == (12, "a" * 32, 30)
    assert lane.task_run_name == "shard-00012"
    assert lane.num_calls == 2
    kept = tmp_path / "root" / "results" / "plan" / "00012.claim-1-t.json"
    assert 0 < kept.stat().st_size < 1024
    assert b'"jsonlib"' in kept.read_bytes()


def test_what_the_store_has_tried_for_long_enough_is_not_tried_again(storage: WritableFileSystem) -> None:
    lane = FaultyLane(StoreError("503 SlowDown"))
    assert isinstance(run(lane, storage, number=6), StoreError)
    assert lane.num_calls == 1


def test_a_lost_claim_is_not_tried_again_and_keeps_its_type(storage: WritableFileSystem) -> None:
    lane = FaultyLane(ClaimLostError("lane-1 committed shard 12"))
    error = run(lane, storage, number=2)
    assert isinstance(error, ClaimLostError)
    assert str(error) == "lane-1 committed shard 12"
    assert lane.num_calls == 1


def test_the_next_claim_of_a_shard_is_not_served_from_the_cache(storage: WritableFileSystem) -> None:
    lane = FaultyLane()
    for number in (3, 4):
        run(lane, storage, number=number)
    assert lane.num_calls == 2


async def _nobody_there_async(*_: Any, **__: Any) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def _nobody_there(*_: Any, **__: Any) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def test_a_shard_is_extracted_while_prefect_s_server_is_away(
    storage: WritableFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim(plan_id="plan", shard=12, number=5, lane="lane-0", token="t")

    @flow(persist_result=False)
    def lane_flow() -> Any:
        with monkeypatch.context() as away:
            away.setattr(PrefectHttpxAsyncClient, "send", _nobody_there_async)
            away.setattr(PrefectHttpxSyncClient, "send", _nobody_there)
            lane = cast(Lane, FaultyLane())
            return submit_shard(lane, claim, storage=storage, root="root").result()["shard"]

    assert lane_flow() == 12


def lane_log(store: Store) -> LaneLog:
    about = {"lane": "lane-0", "run": "run", "device": torch.device("cpu"), "environment": {}}
    return LaneLog(store, "plan", **about, opened_at=now(), clock=Clock())  # type: ignore[arg-type]


def test_the_speed_of_lanes_is_drawn_shown_and_updated_in_place(tmp_path: Path) -> None:
    store = Store.folder(tmp_path)
    log = lane_log(store)

    @flow
    def show() -> None:
        lane, picture = LaneBoard(), SpeedBoard(store, "plan")
        for num_tokens in (100, 200):
            lane.conclude(log.note(num_tokens))
            picture.show(last=True)

    show()
    with get_client(sync_client=True) as client:
        shown = {str(a.key): a for a in client.read_artifacts(limit=200) if a.key in (LANE, SPEED)}
        assert len([a for a in client.read_artifacts(limit=200) if a.key in (LANE, SPEED)]) == 2
    assert shown[LANE].type == "markdown" and "200 tokens" in str(shown[LANE].data)
    assert shown[SPEED].type == "image" and "lane-0 is" in str(shown[SPEED].description)
    head, _, data = str(shown[SPEED].data).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == store.get("plans/plan/speed.png")


def test_a_server_that_does_not_answer_holds_no_lane_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, answers, shown = lane_log(Store.folder(tmp_path)), threading.Event(), []

    class Slow:
        def show(self, artifact: MarkdownArtifact) -> None:
            assert answers.wait(60)
            shown.append(artifact.markdown)

    monkeypatch.setattr(speed, "InPlace", Slow)
    board = LaneBoard()
    for num_tokens in (100, 200):
        board.show(log.note(num_tokens))
    assert not shown
    answers.set()
    board.conclude(log.note(300))
    assert len(shown) == 2 and "300 tokens" in shown[1]
