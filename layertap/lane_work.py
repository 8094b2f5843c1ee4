"""What a lane does from its first shard to its last: claims, shards in flight, failures, its report."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from layertap.background import in_background
from layertap.catalog import Claim, Outcome
from layertap.errors import (
    ClaimLostError,
    DeviceError,
    SelfCheckError,
    StoppedError,
    StoreError,
    StoreRefusedError,
)
from layertap.host import device_name
from layertap.lane import Lane
from layertap.watcher import BEAT_S

IN_FLIGHT = 2
"""Shards a lane works on at once: one on the device, one draining or reading ahead."""

DRAIN_S = 12.0
"""Seconds that each shard in flight has to end when its lane does; a scheduler kills after 30."""

LANE_ENDING = (StoppedError, DeviceError, SelfCheckError)
"""Errors after which a lane can't go on, and which are no shard's fault; so are those of the whole store."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LaneReport:
    """What a lane did."""

    name: str
    device: str
    committed: list[Outcome] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens in the shards this lane committed."""
        return sum(outcome.num_tokens for outcome in self.committed)


class ShardFuture(Protocol):
    """What `work_through` asks of a future: concurrent.futures' and Prefect's both give it."""

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """Call `fn` with the future once it is done."""

    def result(self) -> Any:
        """The outcome, or raise what the shard raised."""


def work_through(
    lane: Lane, submit: Callable[[Claim], ShardFuture], *, no_fault: tuple[type[Exception], ...] = ()
) -> LaneReport:
    """Claim and extract shards, two in flight, until there is nothing left to claim.

    Args:
        lane: an open lane.
        submit: starts `lane.extract(claim)` in a thread and returns its future; its retries are its own.
        no_fault: errors of whoever runs the threads; a shard that ends with one without an
            outcome is given back.

    Raises:
        StoppedError: the run was told to stop.
        DeviceError, SelfCheckError: this lane can't go on; its open shards are given back.
        StoreError: the store fails as a whole; so are they, if it takes note of that.
    """
    report = LaneReport(name=lane.name, device=device_name(lane.device))
    done: SimpleQueue[tuple[Claim, ShardFuture]] = SimpleQueue()
    num_in_flight = 0
    try:
        while True:
            lane.check_stopped()
            while num_in_flight < IN_FLIGHT and (claim := lane.claim()):
                submit(claim).add_done_callback(partial(_hand_in, done, claim))
                num_in_flight += 1
            if num_in_flight:
                with contextlib.suppress(Empty):
                    finished = done.get(timeout=BEAT_S)
                    num_in_flight -= 1
                    _settle(lane, report, *finished, no_fault)
            elif not lane.wait_for_work():
                report.seconds = lane.clock.seconds
                return report
    finally:
        lane.end()
        with contextlib.suppress(Empty):
            for _ in range(num_in_flight):
                done.get(timeout=DRAIN_S)


def _hand_in(done: "SimpleQueue[tuple[Claim, ShardFuture]]", claim: Claim, future: ShardFuture) -> None:
    done.put((claim, future))


def _settle(
    lane: Lane,
    report: LaneReport,
    claim: Claim,
    future: ShardFuture,
    no_fault: tuple[type[Exception], ...],
) -> None:
    """Book a finished shard: an outcome, or a failure for the store to keep."""
    try:
        future.result()
        if outcome := lane.let_go(claim):
            report.committed.append(outcome)
    except LANE_ENDING:
        raise
    except ClaimLostError:
        lane.let_go(claim)
    except no_fault:
        log.warning("the task of shard %d wasn't run to its end", claim.shard, exc_info=True)
        if outcome := lane.give_back(claim):
            report.committed.append(outcome)
    except StoreRefusedError:
        raise
    except Exception as error:
        if type(error) is StoreError and lane.excuse(claim):
            log.warning("shard %d is given back, for the store failed", claim.shard, exc_info=True)
            return
        lane.fail(claim, error)
        report.failed[claim.shard] = f"{type(error).__name__}: {error}"


def extract_in_threads(lane: Lane) -> LaneReport:
    """Work through the plan without a scheduler, each shard in a plain thread."""
    return work_through(lane, lambda claim: in_background(f"shard-{claim.shard:05d}", lane.extract, claim))
