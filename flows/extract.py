"""The coordinator: plans an extraction, sends lanes to work on it, watches, and publishes what came of it."""

import time
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.dispatch import Lanes
from flows.parameters import Extraction
from layertap.coordinator import Report, Run, Watch
from tasks.artifacts import ProgressBoard, show_outcome, show_plan
from tasks.storage import open_store

POLL_S = 3.0
"""Seconds between two looks at the store."""


@flow(name="extract_hidden_states", persist_result=False, result_serializer="json")
def extract_hidden_states(extraction: Extraction) -> State[Any]:
    """Extract the hidden states of a dataset's rows and publish them as a version of the root.

    What the root holds already is not computed again: start the same run again after any failure.
    """
    run = Run.prepare(open_store(extraction.storage, extraction.root), extraction.settings())
    show_plan(run.table)
    watch = run.watch() if run.plan else None
    if watch is not None:
        _work_off(run, extraction, watch)
    else:
        get_run_logger().info("every row is stored already: nothing to compute")
    report = run.publish(watch)
    show_outcome(report)
    report.check(extraction.max_refused_share)
    return Completed(message=_summary(report))


def _summary(report: Report) -> str:
    num_stored = report.num_rows - len(report.missing)
    return (
        f"{num_stored:,} of {report.num_rows:,} rows are stored, {len(report.missing):,} are missing: "
        f"version {report.version.number}"
    )


def _work_off(run: Run, extraction: Extraction, watch: Watch) -> None:
    """Keep lanes at work until every shard has an outcome or has failed for good."""
    lane_parameters = {
        "storage": extraction.storage,
        "root": extraction.root,
        "plan_id": watch.plan.plan_id,
        "run": run.run_id,
        "target": extraction.target,
        "revision": run.preview.info.revision or "",  # a branch may move on while lanes start
    }
    board = ProgressBoard()
    with Lanes(extraction.num_lanes, lane_parameters) as lanes:
        try:
            while not (progress := watch.poll()).finished:
                board.show(progress)
                lanes.tend(progress)
                time.sleep(POLL_S)
            board.show(progress, last=True)
        except BaseException:
            run.stop()
            raise
