"""The coordinator: plans an extraction, sends lanes to work on it, watches, and publishes what came of it."""

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed

from flows import OPTIONS
from flows.dispatch import Lanes, LanesLostError
from flows.parameters import Extraction
from layertap.coordinator import Run
from layertap.errors import StoppedError, StoreError
from layertap.failures import ShardFailure, watched_failures
from layertap.pause import StorePause
from layertap.report import Report
from layertap.shard_state import ShardState
from layertap.watch import Watch
from tasks.artifacts import ProgressBoard, server_may_be_away, show_failures, show_outcome, show_plan
from tasks.speed import SpeedBoard
from tasks.storage import local_dataset, open_store

POLL_S = 3.0
"""Seconds between two looks at the store."""


@flow(name="extract_hidden_states", flow_run_name="{extraction.run_name}", **OPTIONS)
def extract_hidden_states(extraction: Extraction) -> State[Any]:
    """Extract the hidden states of a dataset's rows and publish them as a version of the root.

    What the root holds already is not computed again: start the same run again after any failure.
    """
    return extract_to_end(extraction)


def extract_to_end(extraction: Extraction, *, shards: Collection[int] = ()) -> State[Any]:
    """The state that `extract` ends in, where it doesn't fail: Completed, or Cancelled if told to stop."""
    try:
        return Completed(message=str(extract(extraction, shards=shards)))
    except StoppedError as error:
        return Cancelled(message=str(error))


def extract(extraction: Extraction, *, shards: Collection[int] = ()) -> Report:
    """Do what the form asks for; to be called from a flow.

    Args:
        extraction: the form.
        shards: of an unfinished plan, those to try again after they failed; all of them by default.

    Raises:
        LayertapError: as `Run.prepare`, `Run.publish` and `Report.check`; LanesLostError.
    """
    log = get_run_logger()
    _tag(extraction.tags)
    store = open_store(extraction.storage, extraction.root)
    log.info("planning %s into %s", extraction.dataset, store.uri)
    board = ProgressBoard()
    run = Run.prepare(
        store,
        replace(extraction.settings(), dataset=local_dataset(extraction.storage, extraction.dataset)),
        request=extraction.model_dump(),
        started_by=str(runtime.flow_run.id),
        shards=shards,
        show=board.show_waiting,
    )
    show_plan(run.table, store.uri)
    log.info("run %s: %s", run.run_id, ", ".join(f"{name} {value}" for name, value in run.table))
    watch = run.watch() if run.plan else None
    if watch is not None:
        _work_off(run, extraction, watch, board)
    else:
        log.info("every row is stored already: nothing to compute")
    report, failures = run.pause().outlast(lambda: _publish(run, watch), board.show_waiting)
    board.conclude(report)
    show_outcome(report)
    show_failures(failures, store.uri)
    log.info("%s", report)
    report.check(extraction.further.max_refused_share)
    return report


def _tag(tags: list[str]) -> None:
    """Let the run be found by its root, dataset and target; the deployment's tags stay."""
    with server_may_be_away(), get_client(sync_client=True) as client:
        client.update_flow_run(runtime.flow_run.id, tags=sorted({*runtime.flow_run.tags, *tags}))


def _publish(run: Run, watch: Watch | None) -> tuple[Report, list[ShardFailure]]:
    report = run.publish(watch)
    return report, watched_failures(watch) if watch else []


def _work_off(run: Run, extraction: Extraction, watch: Watch, board: ProgressBoard) -> None:
    """Keep lanes at work until every shard has an outcome or has failed for good."""
    lane_parameters = {
        "storage": extraction.storage,
        "root": extraction.root,
        "plan_id": watch.plan.plan_id,
        "run": run.run_id,
        "target": extraction.target,
        "revision": run.preview.info.revision or "",  # a branch may move on while lanes start
        "compiled": extraction.further.compiled,
        "strict_kernels": extraction.further.strict_kernels,
    }
    board.begin()
    speed = SpeedBoard(watch.catalog.store, watch.plan.plan_id)
    with Lanes(extraction.num_lanes, lane_parameters, extraction.tags) as lanes:
        pause = run.pause(lanes.are_at_work)
        try:
            while not look(run, watch, lanes, pause, board):
                if not pause.reason:
                    speed.show()
                time.sleep(POLL_S)
        except BaseException:
            with suppress(StoreError):  # a store that failed ends its lanes itself
                run.stop()
            raise
    speed.show(last=True)  # lanes tell their last when they end


def look(run: Run, watch: Watch, lanes: Lanes, pause: StorePause, board: ProgressBoard) -> bool:
    """Look at the store, show what is there and see to the lanes; or wait for a store that fails as a whole.

    Returns:
        Whether every shard has an outcome or has failed for good.

    Raises:
        LanesLostError, StoppedError: as they say.
        StoreRefusedError: the store has failed for too long.
    """
    with pause.noted():
        if pause.reason and pause.is_over():
            run.excuse(lanes.excuse(is_true=pause.was_seen))
            watch.forget()
            pause.was_seen = False
        if not pause.reason:
            progress = watch.poll()
            board.show(progress, last=progress.finished)
            if progress.finished:
                return True
            pause.note_committed(progress.shards_by_state.get(ShardState.COMMITTED, 0))
            run.check_stopped()
            if lanes.seem_lost(progress):
                pause.probe()
            try:
                lanes.tend(progress)
            except LanesLostError:  # lanes may have begun, worked and died since the store was looked at
                lanes.tend(watch.poll())
            if words := lanes.hear():
                pause.begin(words)
    if pause.reason:
        board.show_waiting(str(pause))
    return False
