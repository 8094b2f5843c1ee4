"""Ends extractions: in the store, which every lane watches, and in Prefect; the coordinator may be dead."""

import time
from collections.abc import Collection, Sequence
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun
from prefect.states import Cancelled, Cancelling

from flows import DEFAULT_STORAGE, OPTIONS
from flows.flow_runs import read_flow_runs
from flows.turns import runs_on
from layertap.catalog import Catalog
from layertap.run_records import RunRecord, RunRecords
from layertap.store import Store
from tasks.artifacts import server_may_be_away
from tasks.storage import open_store

PATIENCE_S = 60.0
"""Seconds that coordinator and lanes have to end by themselves."""

POLL_S = 2.0

LIVES = FlowRunFilterState(type=FlowRunFilterStateType(not_any_=sorted(TERMINAL_STATES)))
LANE = FlowFilter(name=FlowFilterName(any_=["extraction_lane"]))


@flow(name="cancel_extraction", flow_run_name="cancel {flow_run_id}", **OPTIONS)
def cancel_extraction(flow_run_id: str) -> str:
    """See a cancelled extraction to its end, also when its coordinator is dead.

    Args:
        flow_run_id: Flow run of the coordinator; an event's resource is called prefect.flow-run.ID.
    """
    return cancel_flow_run(flow_run_id.removeprefix("prefect.flow-run."))


def cancel_flow_run(flow_run_id: str) -> str:
    """End a coordinator and its lanes, whether it extracts, plans or waits, and whether it lives."""
    store = open_store(*place_of(flow_run_id))
    ended = cancel_runs(store, _runs_of(store, flow_run_id), flow_run_id)
    _stop(store, _runs_of(store, flow_run_id))  # it may have begun to extract meanwhile
    return ended


def _runs_of(store: Store, flow_run_id: str) -> list[RunRecord]:
    return [run for run in RunRecords(store).all() if run.started_by == flow_run_id]


def place_of(flow_run_id: str) -> tuple[str, str]:
    """Storage block and root that a flow run of layertap works on."""
    with get_client(sync_client=True) as client:
        parameters = client.read_flow_run(UUID(flow_run_id)).parameters
    form = next((value for value in parameters.values() if isinstance(value, dict)), parameters)
    return form.get("storage", DEFAULT_STORAGE), form["root"]


def cancel_runs(
    store: Store,
    runs: Sequence[RunRecord],
    *flow_runs: str,
    waiting_on: Collection[tuple[str, str]] = (),
) -> str:
    """End runs on a root, first in the store, then in Prefect; returns what was ended, in words.

    Args:
        store: the root.
        runs: those that have begun to extract, oldest first.
        flow_runs: other flow runs to end, which may not have come so far.
        waiting_on: storage block and folder of roots; runs that wait for their turn on one are ended too.
    """
    _stop(store, runs)
    coordinators = {UUID(k) for k in (*flow_runs, *(run.started_by for run in runs)) if k}
    ended = "told the lanes through the store; Prefect's server is away, its states follow"
    with server_may_be_away(), get_client(sync_client=True) as client:
        lanes = _lanes(client, {run.run_id for run in runs})
        coordinators |= {run.id for run in runs_on(client, waiting_on)}
        ended = _end_all(client, [*_living(client, coordinators), *lanes])
    return ended


def _stop(store: Store, runs: Sequence[RunRecord]) -> None:
    for run in reversed(runs):  # the newest may hold GPUs, and there may be hundreds that are long over
        if run.plan_id:
            Catalog(store).stop(run.plan_id, run.run_id)


def _end_all(client: SyncPrefectClient, living: Collection[FlowRun]) -> str:
    for flow_run in living:
        _end(client, flow_run)
    forced = _wait(client, [flow_run.id for flow_run in living])
    names = ", ".join(flow_run.name for flow_run in living) or "nothing ran any more"
    return f"ended: {names}" + (f"; {len(forced)} of them had no process left" if forced else "")


def _lanes(client: SyncPrefectClient, run_ids: Collection[str]) -> list[FlowRun]:
    """Lanes of the runs that aren't over."""
    lanes = read_flow_runs(client, FlowRunFilter(state=LIVES), LANE)
    return [lane for lane in lanes if lane.parameters.get("run") in run_ids]


def _living(client: SyncPrefectClient, ids: Collection[UUID]) -> list[FlowRun]:
    """Of flow runs those that aren't over; one that was deleted is."""
    return read_flow_runs(client, FlowRunFilter(id=FlowRunFilterId(any_=list(ids)), state=LIVES))


def _end(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Cancel a flow run. One that a worker has taken has an engine, or soon will: Cancelled won't stop it."""
    state = flow_run.state
    if state is not None and (state.is_running() or state.is_pending()):
        client.set_flow_run_state(flow_run.id, Cancelling())
    elif state is None or not state.is_cancelling():
        client.set_flow_run_state(flow_run.id, Cancelled(message="its run was cancelled"), force=True)


def _wait(client: SyncPrefectClient, ids: Collection[UUID]) -> list[UUID]:
    """Wait until the flow runs are over; those that are not in time are dead, and are marked Cancelled."""
    deadline = time.monotonic() + PATIENCE_S
    while left := [flow_run.id for flow_run in _living(client, ids)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for k in left:
        client.set_flow_run_state(k, Cancelled(message="its process was gone"), force=True)
    return left
