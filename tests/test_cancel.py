"""Who is ended with a run, as a real Prefect server tells it: coordinators and lanes that live."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Cancelling, Completed, Pending, Running, Scheduled

from deployments import run_commands
from flows import cancel, flow_runs
from flows.cancel import cancel_flow_run, cancel_runs
from layertap.catalog import Catalog
from layertap.run_records import RunRecord, RunRecords
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
    return client.create_flow_run(lane, parameters={"run": run}, state=Scheduled())


def coordinator_of(client: SyncPrefectClient, state: State[Any]) -> FlowRun:
    return client.create_flow_run(coordinator, parameters={"extraction": {"root": "a"}}, state=state)


def record_of(run_id: str, started_by: str) -> RunRecord:
    return RunRecord(run_id=run_id, plan_id="plan", started_at=run_id, started_by=started_by, request={})


def test_all_lanes_and_coordinators_that_live_are_ended_whoever_was_deleted_from_prefect(
    client: SyncPrefectClient, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "PAGE", 2)
    done, waiting = coordinator_of(client, Completed()), coordinator_of(client, Scheduled())
    started_by = {"0": str(uuid4()), "1": str(done.id), "2": str(waiting.id)}
    lanes = [lane_of(client, run) for run in "00222"]
    stranger = lane_of(client, "of another root, or a run that isn't to end")
    told = cancel_runs(folder_store, [record_of(run, by) for run, by in started_by.items()])
    assert {name in told for name in (waiting.name, *(lane.name for lane in lanes))} == {True}
    assert done.name not in told and "no process left" not in told
    for ended in (waiting, *lanes):
        assert client.read_flow_run(ended.id).state_name == "Cancelled"
    assert client.read_flow_run(done.id).state_name == "Completed"
    assert client.read_flow_run(stranger.id).state_name == "Scheduled"


def test_the_command_ends_a_run_that_waits(
    client: SyncPrefectClient, folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.storage.open_store", lambda storage, root: folder_store)
    monkeypatch.setattr(cancel, "open_store", lambda storage, root: folder_store)
    waiting = coordinator_of(client, Scheduled())
    told = CliRunner().invoke(run_commands.cancel, [str(waiting.id), "--state", str(tmp_path)])
    assert (told.exit_code, told.output) == (0, f"ended: {waiting.name}\n")
    assert client.read_flow_run(waiting.id).state_name == "Cancelled"


def test_the_command_ends_runs_that_the_library_began_the_newest_first(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(Catalog, "stop", lambda self, plan_id, run: stopped.append(run))
    for run in "123":
        RunRecords(folder_store).put(record_of(run, ""))
    told = CliRunner().invoke(run_commands.cancel, [folder_store.uri, "--state", str(tmp_path)])
    assert (told.exit_code, told.output) == (0, "ended: nothing ran any more\n")
    assert stopped == ["3", "2", "1"]


@pytest.mark.parametrize("state", [Pending(), Running(), Cancelling()])
def test_a_coordinator_that_died_while_it_planned_is_ended_and_so_are_lanes_that_it_may_have_sent(
    client: SyncPrefectClient, folder_store: Store, monkeypatch: pytest.MonkeyPatch, state: State[Any]
) -> None:
    monkeypatch.setattr(cancel, "open_store", lambda storage, root: folder_store)
    monkeypatch.setattr(cancel, "PATIENCE_S", 0.0)
    planning, honest = coordinator_of(client, state), cancel._wait

    def wait(*args: Any) -> Any:
        RunRecords(folder_store).put(record_of("late", str(planning.id)))
        assert client.set_flow_run_state(planning.id, Running()).status == SetStateStatus.REJECT
        return honest(*args)

    monkeypatch.setattr(cancel, "_wait", wait)
    assert cancel_flow_run(str(planning.id)) == f"ended: {planning.name}; 1 of them had no process left"
    assert client.read_flow_run(planning.id).state_name == "Cancelled"
    assert Catalog(folder_store).stopping("plan", "late")
