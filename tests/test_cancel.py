"""Who is ended with a run, as a real Prefect server tells it: coordinators and lanes that live."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Scheduled

from flows import cancel
from flows.cancel import cancel_runs
from layertap.run_records import RunRecord
from layertap.store import Store

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@flow(name="extract_hidden_states")
def coordinator(extraction: dict[str, Any]) -> None:
    pass


@flow(name="extraction_lane")
def lane(run: str) -> None:
    pass


def lane_of(client: SyncPrefectClient, run: str) -> FlowRun:
    return client.create_flow_run(lane, parameters={"run": run}, tags=["root:a"], state=Scheduled())


def coordinator_of(client: SyncPrefectClient, state: State[Any]) -> FlowRun:
    return client.create_flow_run(coordinator, parameters={"extraction": {"root": "a"}}, state=state)


def record_of(run_id: str, started_by: str) -> RunRecord:
    return RunRecord(run_id=run_id, plan_id="plan", started_at=run_id, started_by=started_by, request={})


def test_all_lanes_and_coordinators_that_live_are_ended_whoever_was_deleted_from_prefect(
    client: SyncPrefectClient, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel, "PAGE", 2)
    done, waiting = coordinator_of(client, Completed()), coordinator_of(client, Scheduled())
    started_by = {"0": str(uuid4()), "1": str(done.id), "2": str(waiting.id)}
    lanes = [lane_of(client, run) for run in "00222"]
    stranger = lane_of(client, "of another root, or a run that isn't to end")
    told = cancel_runs(folder_store, "a", [record_of(run, by) for run, by in started_by.items()])
    assert {name in told for name in (waiting.name, *(lane.name for lane in lanes))} == {True}
    assert done.name not in told and "no process left" not in told
    for ended in (waiting, *lanes):
        assert client.read_flow_run(ended.id).state_name == "Cancelled"
    assert client.read_flow_run(done.id).state_name == "Completed"
    assert client.read_flow_run(stranger.id).state_name == "Scheduled"
