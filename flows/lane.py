"""One lane: the target on one GPU, working through the shards of a plan."""

import shlex
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.filesystems import WritableFileSystem
from prefect.futures import PrefectFuture
from prefect.states import Cancelled, Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows import OPTIONS
from flows.dispatch import STORE_FAILED
from layertap.catalog import Catalog, Claim
from layertap.errors import StoppedError, StoreError, is_store_wide
from layertap.failures import forget_failures
from layertap.lane import Lane
from layertap.lane_work import IN_FLIGHT, LaneReport, work_through
from tasks.results import ShardResults
from tasks.shards import SERVER_ERRORS, submit_shard
from tasks.speed import LaneBoard
from tasks.storage import load_block, store_in


@flow(
    name="extraction_lane",
    flow_run_name="{name}",
    task_runner=ThreadPoolTaskRunner(max_workers=IN_FLIGHT),  # type: ignore[arg-type]
    **OPTIONS,
)
def extraction_lane(
    storage: str,
    root: str,
    plan_id: str,
    run: str,
    target: str,
    name: str,
    revision: str = "",
    compiled: bool = True,
    strict_kernels: bool = True,
) -> State[Any]:
    """Load the target once and extract shard after shard until none is left.

    Args:
        storage: Storage block that holds the root.
        root: Folder of the root under the block.
        plan_id: Plan to work through.
        run: Run that the lane works for; it ends when that one is told to stop.
        target: Hub id of the target, or its folder on this host.
        name: What the lane is called in claims and outcomes.
        revision: Hub revision of the target.
        compiled: Whether the decoder layers are compiled, on a GPU.
        strict_kernels: Whether to refuse transformers' slow reference code, on a GPU.
    """
    block = load_block(storage)
    try:
        store = store_in(block, root)
        if runtime.flow_run.run_count > 1:  # somebody pressed Retry
            name = f"{name}-again-{runtime.flow_run.run_count}"
            forget_failures(Catalog(store), plan_id)
        lane = Lane.open(
            store,
            plan_id,
            run=run,
            target=target,
            revision=revision or None,
            name=name,
            compiled=compiled,
            strict_kernels=strict_kernels,
        )
        return _work(lane, block, root) if lane else Completed(message="no shard was left to extract")
    except StoppedError as error:
        way_on = (
            f"to go on, press Retry on the run's coordinator, or `layertap retry {shlex.quote(store.uri)}`"
        )
        return Cancelled(message=f"{error}; {way_on}")
    except StoreError as error:
        if not is_store_wide(error):
            raise
        return Failed(name=STORE_FAILED, message=str(error))


def _work(lane: Lane, block: WritableFileSystem, root: str) -> State[Any]:
    board, results = LaneBoard(), ShardResults.of(block, lane.catalog.store, root)

    def submit(claim: Claim) -> PrefectFuture[Any]:
        board.show(lane.record)
        return submit_shard(lane, claim, storage=results, root=root)

    with lane:
        report = work_through(lane, submit, no_fault=SERVER_ERRORS)
    board.conclude(lane.record)
    get_run_logger().info("%s; seconds by what they went to: %s", lane.record.bottleneck, _seconds(report))
    return Completed(message=_summary(report))


def _summary(report: LaneReport) -> str:
    text = f"{len(report.committed):,} shards committed, {report.num_tokens:,} tokens, on {report.device}"
    return f"{text}; {len(report.failed):,} failed here" if report.failed else text


def _seconds(report: LaneReport) -> str:
    return ", ".join(f"{kind} {spent_s:.1f}" for kind, spent_s in report.seconds.items())
