"""What a run shows in Prefect's UI: its plan, its progress, its shards, its outcome.

There are a few artifacts a run, however many shards, and each is updated in place: a version an update would
fill the database.
"""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import islice
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import (
    Artifact,
    ProgressArtifact,
    TableArtifact,
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.exceptions import PrefectHTTPStatusError

from layertap.failures import ShardFailure, markdown
from layertap.report import MAX_TABLE_ROWS, Report
from layertap.watch import RunProgress

ROOT, PLAN, PROGRESS, SHARDS = "layertap-root", "layertap-plan", "layertap-progress", "layertap-shards"
OUTCOME, REFUSED, FAILURES = "layertap-outcome", "layertap-refused", "layertap-failures"
"""Keys of the artifacts."""

VERIFICATION = "layertap-verification"

PROGRESS_EVERY_S = 5.0
SHARDS_EVERY_S = 30.0
LINE_EVERY_S = 60.0

MAX_FAILURES = 20
"""Failures shown with their tracebacks."""

log = logging.getLogger(__name__)


@contextmanager
def only_shown() -> Iterator[None]:
    """Let pass whatever Prefect's server, or a proxy before it, says of what is for people alone."""
    try:
        yield
    except httpx.HTTPError as error:
        log.warning("not shown in Prefect's UI, going on: %s", error)


@contextmanager
def server_may_be_away() -> Iterator[None]:
    """Let an outage of Prefect's server pass: extraction goes on without it."""
    try:
        yield
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        if isinstance(error, PrefectHTTPStatusError) and error.response.status_code < 500:
            raise
        log.warning("Prefect's server didn't answer, going on: %s", error)


def show_plan(rows: Sequence[tuple[str, str]], uri: str) -> None:
    """Show the plan as a table, and where its root is."""
    table = [{"item": name, "value": value} for name, value in rows]
    with only_shown():
        create_link_artifact(uri, uri, key=ROOT, description="Where this run stores hidden states")
        create_table_artifact(table, key=PLAN, description="What this run is going to do")


def show_outcome(report: Report) -> None:
    """Show what came of the run, which is published already, whether or not the server answers."""
    with only_shown():
        create_markdown_artifact(report.markdown(), key=OUTCOME, description="What this run has stored")
        if report.missing:
            rows = [{"row": k, "why": why} for k, why in islice(report.missing.items(), MAX_TABLE_ROWS)]
            where = (
                f"{len(report.missing):,} rows are missing; all of them: {report.uri}/{report.missing_rows}"
            )
            create_table_artifact(rows, key=REFUSED, description=where)


def show_failures(failures: Sequence[ShardFailure], uri: str) -> None:
    """Show why shards failed and how to try them again."""
    if failures:
        with only_shown():
            pages = _pages({failure.lane for failure in failures[:MAX_FAILURES]})
            text = markdown(failures, uri, at_most=MAX_FAILURES, pages=pages)
            create_markdown_artifact(text, key=FAILURES, description="Shards that failed, and how to retry")


def _pages(lanes: Collection[str]) -> dict[str, str]:
    """Address of each lane's page in the UI; a lane that was retried bears another name than its run."""
    named = FlowRunFilter(name=FlowRunFilterName(any_=list(lanes)))
    with get_client(sync_client=True) as client:
        return {
            run.name: f"/v2/runs/flow-run/{run.id}" for run in client.read_flow_runs(flow_run_filter=named)
        }


class InPlace:
    """An artifact that is updated in place, and made anew where somebody deleted it."""

    def __init__(self) -> None:
        self._made: UUID | None = None

    def show(self, artifact: Artifact) -> None:
        """Have this be what the artifact says."""
        if self._made is None or not _update(self._made, artifact):
            self._made = cast(Any, artifact.create()).id


class ProgressBoard:
    """Progress and shards of a run, kept up to date at a rate that the server bears."""

    def __init__(self) -> None:
        self._progress, self._shards = InPlace(), InPlace()
        self._progress_due = self._shards_due = self._line_due = time.monotonic()
        self._percent = 0.0
        self._says_why_it_waits = False

    def begin(self) -> None:
        """Show that lanes are about to start."""
        with only_shown():
            self._show_progress("starting lanes")
            self._show_shards([], "no shard yet")

    def show(self, progress: RunProgress, *, last: bool = False) -> None:
        """Show `progress` unless the last update was a moment ago; the last one is always shown."""
        now = time.monotonic()
        self._percent = progress.percent
        if last or now >= self._line_due:
            self._line_due = now + LINE_EVERY_S
            get_run_logger().info("%s; %s", progress, _counts(progress))
        with only_shown():
            if last or now >= self._progress_due:
                self._progress_due = now + PROGRESS_EVERY_S
                self._show_progress(str(progress))
                self._says_why_it_waits = False
            if last or now >= self._shards_due:
                self._shards_due = now + SHARDS_EVERY_S
                self._show_shards(progress.shards, f"{_counts(progress)}. {_which(progress)}")

    def show_waiting(self, why: str) -> None:
        """Show that the run waits, and what for, in the place of its progress."""
        now = time.monotonic()
        if now >= self._line_due:
            self._line_due = now + LINE_EVERY_S
            get_run_logger().warning("%s", why)
        if now >= self._progress_due:
            self._progress_due = now + PROGRESS_EVERY_S
            with only_shown():
                self._show_progress(why)
                self._says_why_it_waits = True

    def conclude(self, report: Report) -> None:
        """Say what came of the run, where it would still be said that it waits."""
        if self._says_why_it_waits:
            with only_shown():
                self._show_progress(str(report))

    def _show_progress(self, text: str) -> None:
        self._progress.show(ProgressArtifact(key=PROGRESS, progress=self._percent, description=text))

    def _show_shards(self, table: list[dict[str, Any]], text: str) -> None:
        self._shards.show(TableArtifact(key=SHARDS, table=table, description=text))


def _counts(progress: RunProgress) -> str:
    counts = ", ".join(f"{number:,} {state}" for state, number in sorted(progress.shards_by_state.items()))
    total = sum(progress.shards_by_state.values())
    return f"{total:,} shards: {counts}"


def _which(progress: RunProgress) -> str:
    return f"Shown are {len(progress.shards):,}, those that need a look first"


def _update(made: UUID, artifact: Artifact) -> bool:
    """Whether the artifact that was made is still there, and is updated."""
    update = ArtifactUpdate(data=cast(Any, artifact.format()), description=artifact.description)
    try:
        with get_client(sync_client=True) as client:
            client.update_artifact(made, update)
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTPStatus.NOT_FOUND:
            raise
        return False
    return True
