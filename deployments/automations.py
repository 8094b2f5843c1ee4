"""What the server does by itself: declares silent runs dead, restarts coordinators, ends cancelled runs."""

from datetime import timedelta
from typing import Any

HEARTBEAT_S = "30"
"""Seconds between two heartbeats of a flow run; workers pass it on as PREFECT_FLOWS_HEARTBEAT_FREQUENCY."""

SILENCE = timedelta(minutes=10)
"""After so long without a heartbeat a run is dead. Loading a model may hold the GIL, and a server that was
away for five minutes must not take every run for dead when it is back."""

MAX_RUNS = 5
"""Coordinators that went silent are started again until they have run so often."""

COORDINATORS = ["extract_hidden_states", "retry_failed_shards", "reextract_when_changed"]
FLOWS = [*COORDINATORS, "extraction_lane", "prepare_dataset", "cancel_extraction", "verify"]
OWN_ENDS = ("Skipped", "StoreFailed")
ENDS = [f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed", *OWN_ENDS)]
"""Events of terminal states: they go by a state's name, and some flows name theirs."""


def make_automations(silence: timedelta = SILENCE) -> list[str]:
    """Make the automations, or bring them up to date; returns their names."""
    silent = f"no heartbeat for {silence.total_seconds():g} s: its host or its process is gone"
    made = [_declare_dead(silence, silent), _replace_coordinator(silent), _end_cancelled()]
    for automation in made:
        _save(automation)
    return [str(automation.name) for automation in made]


def _declare_dead(silence: timedelta, silent: str) -> Any:
    from prefect.automations import Automation, ChangeFlowRunState, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType

    heartbeat = "prefect.flow-run.heartbeat"
    return Automation(
        name="layertap: a run without heartbeats has crashed",
        trigger=EventTrigger(
            after={heartbeat},
            expect={heartbeat, *ENDS},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_of(FLOWS),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silence,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, name=None, message=silent, force=False)],
    )


def _replace_coordinator(silent: str) -> Any:
    from prefect.automations import Automation, ChangeFlowRunState, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType

    return Automation(
        name="layertap: a coordinator that went silent is started again",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed"},
            match={
                "prefect.resource.id": "prefect.flow-run.*",
                "prefect.state-message": silent,
                "prefect.run-count": [str(count) for count in range(MAX_RUNS)],
            },
            match_related=_of(COORDINATORS),
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.SCHEDULED, name="AwaitingRetry", message="it went silent", force=False
            )
        ],
    )


def _end_cancelled() -> Any:
    from prefect.automations import Automation, EventTrigger, Posture, RunDeployment

    return Automation(
        name="layertap: a cancelled coordinator takes its lanes with it",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Cancelling"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_of(COORDINATORS),
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=_deployment_id("cancel_extraction/cancel-extraction"),
                parameters={"flow_run_id": "{{ event.resource.id }}"},
                job_variables=None,
            )
        ],
    )


def _of(flows: list[str]) -> dict[str, Any]:
    return {"prefect.resource.role": "flow", "prefect.resource.name": flows}


def _deployment_id(name: str) -> Any:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(name).id


def _save(automation: Any) -> None:
    from prefect.automations import Automation

    try:
        existing: Any = Automation.read(name=automation.name)
    except ValueError:
        automation.create()
        return
    automation.id = existing.id
    automation.update()
