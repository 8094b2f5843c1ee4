"""A run of the extraction deployment, started and followed from a terminal."""

import time
from collections.abc import Mapping
from typing import Any, Self, cast
from uuid import UUID

import click
import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import get_current_settings
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from deployments.bootstrap import NoServerError, server_answers
from flows.parameters import Extraction
from layertap.errors import InputError, LayertapError
from tasks.artifacts import PROGRESS

DEPLOYMENT = "extract_hidden_states/extract-hidden-states"
POLL_S = 1.0
LINE_EVERY_S = 10.0

PATIENCE_S = 600.0
"""Seconds without an answer of the server before following is given up."""


class RunFailedError(LayertapError):
    """The flow run ended in another state than Completed."""


def run_extraction(form: Mapping[str, Any]) -> None:
    """Start a run with these parameters, show its progress, and print what came of it.

    Raises:
        InputError: a parameter is out of its range, or there is no server with the deployment.
        NoServerError: the server doesn't answer, or refuses.
        RunFailedError: the run didn't complete; with its message.
    """
    follow_deployment(DEPLOYMENT, {"extraction": Extraction.of(form).model_dump()})


def follow_deployment(deployment: str, parameters: dict[str, Any]) -> None:
    """Start a run of a deployment, show its progress, and print what came of it.

    Raises:
        InputError: a parameter is out of its range, or there is no server with the deployment.
        NoServerError: the server doesn't answer, or refuses.
        RunFailedError: the run didn't complete; with its message.
    """
    started = _start(deployment, parameters)
    click.echo(f"run {started.id}: {_url(started)}")  # its name changes when it begins
    try:
        with get_client(sync_client=True) as client:
            state = _follow(client, started.id)
    except KeyboardInterrupt:
        click.echo(f"the run goes on; `layertap cancel {started.id}` ends it")
        raise
    if not state.is_completed():
        told = (state.message or "").removeprefix("Flow run encountered an exception: ")
        raise RunFailedError(f"the run ended {state.name}: {told}")
    click.echo(state.message)


def _start(deployment: str, parameters: dict[str, Any]) -> FlowRun:
    try:
        with server_answers():
            return cast(FlowRun, run_deployment(deployment, parameters=parameters, timeout=0))
    except ObjectNotFound as error:
        raise InputError(
            f"the server has no deployment {deployment}: make it with `python -m deployments.bootstrap`"
        ) from error


def _url(started: FlowRun) -> str:
    ui = get_current_settings().ui_url or ""
    return f"{ui}/v2/runs/flow-run/{started.id}"  # redirects whoever prefers V1


def _follow(client: SyncPrefectClient, flow_run: UUID) -> State[Any]:
    """Show the run's progress until it ends; an outage of the server is waited out for some minutes."""
    answered = time.monotonic()
    with Display() as display:
        while True:
            time.sleep(POLL_S)
            try:
                state = client.read_flow_run(flow_run).state
                assert state is not None
                display.show(state.name or "", *_progress(client, flow_run))
            except (httpx.TransportError, PrefectHTTPStatusError) as error:
                if time.monotonic() - answered > PATIENCE_S:
                    raise NoServerError(f"Prefect's server is gone ({error}); the run may go on") from error
                continue
            answered = time.monotonic()
            if state.is_final():
                return state


class Display:
    """A progress bar on a terminal, else a line now and then. A context manager."""

    def __init__(self) -> None:
        console = Console()
        self._is_terminal = console.is_terminal
        self._line_due = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.fields[state]}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task("", total=100.0, state="")

    def show(self, state: str, percent: float, text: str) -> None:
        """Show the state of the run, the share that is done, and rate and ETA in words."""
        self._bar.update(self._task, completed=percent, description=text, state=state)
        if not self._is_terminal and time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            click.echo(f"{state} {percent:.0f}% {text}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _progress(client: SyncPrefectClient, flow_run: UUID) -> tuple[float, str]:
    """Percentage and description of the run's progress artifact; 0 before there is one."""
    wanted = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]), key=ArtifactFilterKey(any_=[PROGRESS])
    )
    for artifact in client.read_artifacts(artifact_filter=wanted):
        return float(str(artifact.data)), artifact.description or ""
    return 0.0, ""
