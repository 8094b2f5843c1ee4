"""Whose turn it is: of the runs that look after one root one works, and the next waits to look once more."""

import time
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
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

RUNNING = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])))
REEXTRACTIONS = FlowFilter(name=FlowFilterName(any_=["reextract_when_changed"]))


def wait_for_turn(form: Reextraction) -> bool:
    """Wait until this flow run is the first that looks after its root.

    Returns:
        False, at once, if one that was asked for the same waits already: it will see what woke this run,
        for it hasn't looked yet.
    """
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(runtime.flow_run.id))
    ahead = _ahead(own, form)
    if ahead:
        get_run_logger().info("another run looks after %s: waiting until it has ended", form.root)
    while ahead:
        if form in ahead[1:]:
            return False
        time.sleep(POLL_S)
        with server_may_be_away():
            ahead = _ahead(own, form)
    return True


def _ahead(own: FlowRun, form: Reextraction) -> list[Reextraction]:
    """What the runs on the root were asked for that began before this one, oldest first."""
    with get_client(sync_client=True) as client:
        runs = read_flow_runs(client, RUNNING, REEXTRACTIONS)
    earlier = sorted((run for run in runs if _began(run) < _began(own)), key=_began)
    forms = [Reextraction.model_validate(run.parameters["reextraction"]) for run in earlier]
    return [other for other in forms if (other.storage, other.root) == (form.storage, form.root)]


def _began(run: FlowRun) -> float:
    """When a running run last began, by the server's clock: one that was started again goes to the end."""
    assert run.state is not None
    return run.state.timestamp.timestamp()
