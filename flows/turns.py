"""Whose turn it is: of the runs that look after one root one works, and the next waits to look once more."""

import time
from collections.abc import Collection, Sequence
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType

from flows.flow_runs import read_flow_runs
from flows.parameters import Reextraction
from tasks.artifacts import server_may_be_away

POLL_S = 5.0

AT_WORK = [StateType.RUNNING, StateType.CANCELLING]
"""One that is being cancelled may hold GPUs yet."""

LOOKING = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=AT_WORK)))
REEXTRACTIONS = FlowFilter(name=FlowFilterName(any_=["reextract_when_changed"]))


def wait_for_turn(form: Reextraction) -> bool:
    """Wait until this flow run is the first that looks after its root.

    Returns:
        False, at once, if one that was asked for the same waits already: it will see what woke this run,
        for it hasn't looked yet.
    """
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(runtime.flow_run.id))
    ahead, told = _ahead(own, form), None
    while ahead:
        if form in map(_form, _running(ahead)[1:]):
            return False
        if ahead[0].id != told:
            told = ahead[0].id
            get_run_logger().info(
                "flow run %s looks after %s: waiting until it has ended; to end it: layertap cancel %s",
                told,
                form.root,
                told,
            )
        time.sleep(POLL_S)
        with server_may_be_away():
            ahead = _ahead(own, form)
    return True


def runs_on(client: SyncPrefectClient, roots: Collection[tuple[str, str]]) -> list[FlowRun]:
    """Runs under way that look after one of these roots (storage block, folder), or wait for their turn."""
    runs = read_flow_runs(client, LOOKING, REEXTRACTIONS)
    return [run for run in runs if _place(_form(run)) in roots]


def _ahead(own: FlowRun, form: Reextraction) -> list[FlowRun]:
    """Runs on the root to be waited for: those being cancelled, then those that began before, in order."""
    with get_client(sync_client=True) as client:
        runs = runs_on(client, {_place(form)})
    earlier = [run for run in _running(runs) if _began(run) < _began(own)]
    cancelling = [run for run in runs if run.state_type == StateType.CANCELLING]
    return cancelling + sorted(earlier, key=_began)


def _running(runs: Sequence[FlowRun]) -> list[FlowRun]:
    return [run for run in runs if run.state_type == StateType.RUNNING]


def _form(run: FlowRun) -> Reextraction:
    return Reextraction.model_validate(run.parameters["reextraction"])


def _place(form: Reextraction) -> tuple[str, str]:
    return form.storage, form.root


def _began(run: FlowRun) -> float:
    """When a running run last began, by the server's clock: one that was started again goes to the end."""
    assert run.state is not None
    return run.state.timestamp.timestamp()
