"""A lane: one process with one copy of the target on one device, taking shard after shard of a plan."""

import contextlib
import logging
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from layertap.canary import share_canary
from layertap.catalog import Catalog, Claim, Outcome, PlanRecord
from layertap.errors import (
    ClaimLostError,
    DeviceError,
    LayertapError,
    StoppedError,
    StoreError,
)
from layertap.extract import Extractor, ShardResult
from layertap.gpu_caches import one_compiles
from layertap.host import device_name, host_name
from layertap.kernels import is_context_fatal
from layertap.lane_check import checked_device
from layertap.lane_log import LaneLog
from layertap.lane_record import LaneRecord
from layertap.log_tail import LogTail
from layertap.progress import Clock
from layertap.records import now
from layertap.shard_state import ShardState
from layertap.store import Store
from layertap.store_check import probe
from layertap.target import Target, compare_canary
from layertap.target_files import store_target
from layertap.watchdog import Watchdog, blamed, can_hang, kill_process_group
from layertap.watcher import BEAT_S, Watcher

FAILURES_BEFORE_SELF_CHECK = 2

CUT_OFF_S = 10.0
"""A beat that has not been written for so long says that other lanes' may not be, either."""

LAST_BEAT_S = 10.0
"""Seconds that a beat under way has to end when its lane does."""

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """A claim of this lane and how far its shard is."""

    claim: Claim
    num_tokens: int = 0
    num_rows: int = 0
    attempt: str = ""
    outcome: Outcome | None = None
    clock: Clock = field(default_factory=Clock)

    is_suspect: bool = False
    """Whether a lane has died with this shard in hand."""

    has_killed: bool = False
    """Whether the device was lost in this shard's own work: the claim then counts as a death."""


class Lane:
    """One target on one device, working through the shards of a plan. A context manager.

    Lanes share the shards through claims in the store. A claim is beaten until its shard is committed or
    failed, so other lanes can tell a slow lane from a dead one.
    """

    def __init__(self, catalog: Catalog, plan: PlanRecord, *, run: str, name: str) -> None:
        self._ending = threading.Event()
        self.catalog = Catalog(catalog.store.until(self._ending))
        self.plan = plan
        self.run = run
        self.name = name
        self.clock = Clock()
        """Where the lane's seconds go, from now on."""
        self.opened_at = now("milliseconds")

        self._watcher = Watcher(self.catalog, plan.plan_id, beat_s=BEAT_S)
        self._held: dict[int, _Held] = {}
        self._num_tokens_let_go = 0
        self._failed_here: set[int] = set()
        self._excused: set[int] = set()
        self._failures_in_a_row = 0
        self._unbeaten_since: float | None = None
        self._stopped = threading.Event()
        self._exits = contextlib.ExitStack()

    @classmethod
    def open(
        cls,
        store: Store,
        plan_id: str,
        *,
        run: str,
        target: str,
        revision: str | None = None,
        name: str,
        compiled: bool = True,
        strict_kernels: bool = True,
    ) -> Self | None:
        """Look for work, take the device, load the target and check it.

        Args:
            store: the root the plan lies in.
            plan_id: the plan to work through.
            run: id of the run this lane works for; the lane ends when that run is told to stop.
            target: the target on this host: a hub id or a folder.
            revision: hub revision of the target.
            name: what this lane is called in claims and outcomes.
            compiled: compile the decoder layers, on a GPU.
            strict_kernels: on a GPU, refuse to run with transformers' slow reference code.

        Returns:
            The lane, or None when there is nothing to do.

        Raises:
            TargetError, DeviceError, HostError, SelfCheckError: this host can't work on the plan.
            NotReadyError: several of these; all are in its message.
            StoppedError: the run was told to stop.
        """
        catalog = Catalog(store)
        lane = cls(catalog, catalog.plan(plan_id), run=run, name=name)
        if not lane.wait_for_work():
            return None
        try:
            lane._load(target, revision, compiled)
            lane._make_ready(compiled, strict_kernels)
        except BaseException:
            lane.close()
            raise
        return lane

    def _load(self, source: str, revision: str | None, compiled: bool) -> None:
        self._log_tail = self._exits.enter_context(LogTail())
        with self.clock.spent("loading"):
            root = self.catalog.root()
            checked = checked_device(self.plan, root, source=source, revision=revision, compiled=compiled)
            self.device = self._exits.enter_context(checked)
            if can_hang(self.device):
                Watchdog(self.clock, BEAT_S).start(self._end_wedged, until=self._ending)
            self.target = Target.load(source, spec=root.spec, revision=revision, device=self.device)
        self.self_check()
        with self.clock.spent("loading"):
            store_target(self.catalog.store, self.target)

    def _make_ready(self, compiled: bool, strict_kernels: bool) -> None:
        """Compile, check again what is compiled, and start the threads of the lane."""
        if compiled and self.device.type == "cuda":
            self._compile()
            self.self_check()
        if strict_kernels:
            self.target.refuse_slow_kernels()
        max_batch_bytes = self.plan.max_batch_bytes
        with self.clock.spent("loading"):
            self.extractor = Extractor(
                self.target,
                self.catalog.store,
                max_batch_bytes=max_batch_bytes,
                num_slots=self.target.info.num_slots(self.target.spec, max_batch_bytes),
                clock=self.clock,
            )
        self._lane_log = LaneLog(
            self.catalog.store,
            self.plan.plan_id,
            lane=self.name,
            run=self.run,
            device=self.device,
            environment=self.target.environment(),
            opened_at=self.opened_at,
            clock=self.clock,
        )
        self._note()
        self._exits.callback(self._note_last)
        self._exits.callback(self.extractor.close)
        beats = threading.Thread(target=self._beat_until_closed, name="beats", daemon=True)
        beats.start()
        self._exits.callback(beats.join, LAST_BEAT_S)

    def _compile(self) -> None:
        """Compile the target; to wait for another lane that does counts as loading what it leaves."""
        with self.clock.spent("loading"), one_compiles(self.device), self.clock.spent("compiling"):
            self.target.compile(max_batch_tokens=self.plan.settings.max_batch_tokens)

    def self_check(self) -> None:
        """Check the target against itself and against the canary of the root's first lane."""
        with self.clock.spent("self-check"):
            self.target.self_check()
            mine = self.target.canary_states()
        with self.clock.spent("waiting for the store"):
            first = share_canary(self.catalog.store, mine)
        compare_canary(mine, first)

    def wait_for_work(self) -> bool:
        """Whether there is a shard to claim, now or because the lane that held it has died.

        A claim of a dead lane shows only after three beats without a change, so this may take that long.

        Raises:
            StoppedError: the run was told to stop.
        """
        deadline = time.monotonic() + 4 * BEAT_S
        while True:
            if self._look_for_stop():
                raise StoppedError(f"run {self.run} was told to stop")
            states = self._poll()
            if any(state in (ShardState.WAITING, ShardState.STALE) for state in states.values()):
                return True
            if ShardState.CLAIMED not in states.values() or time.monotonic() > deadline:
                return False
            self._ending.wait(BEAT_S / 2)

    def _poll(self) -> dict[int, ShardState]:
        since = self._unbeaten_since
        if since is not None and time.monotonic() - since > CUT_OFF_S:
            self._watcher.forget()
        self._statuses = self._watcher.poll()
        return {shard: status.state for shard, status in self._statuses.items() if shard not in self._held}

    def claim(self) -> Claim | None:
        """Claim the next shard that waits or whose lane died, or None when there is none just now.

        Shards that failed on this lane come last: another lane may have more luck with them. One that a lane
        died with is held alone: should it be what kills, no other shard dies with it again.
        """
        with self.clock.spent("waiting for the store"):
            return self._claim()

    def _claim(self) -> Claim | None:
        if any(held.is_suspect for held in self._held.values()):
            return None
        for shard in self._candidates():
            number = self._statuses[shard].claim + 1
            details = {"host": host_name(), "device": device_name(self.device), "claimed_at": now()}
            claim = self.catalog.claim(self.plan.plan_id, shard, number, lane=self.name, details=details)
            if claim is not None:
                self._held[shard] = _Held(claim, is_suspect=self._statuses[shard].num_deaths > 0)
                return claim
        return None

    def _candidates(self) -> list[int]:
        """Shards that may be claimed beside those in hand, the least troubled first."""
        states, told = self._poll(), self._statuses
        free = [k for k, state in states.items() if state in (ShardState.WAITING, ShardState.STALE)]
        if self._held:
            free = [k for k in free if not told[k].num_deaths]
        return sorted(
            free, key=lambda k: (k in self._failed_here, told[k].num_deaths + told[k].num_failures, k)
        )

    def extract(self, claim: Claim) -> Outcome:
        """Extract the shard of `claim` and commit it. Safe to call from two threads at once.

        Each call writes under a fresh attempt, so nothing of a failed try is ever taken for data. Called
        again after its commit (a scheduler that lost the result), it returns the outcome.

        Raises:
            ClaimLostError: another lane committed the shard first.
            StoppedError: the run was told to stop.
            StoreError: the store failed for longer than its retries last.
            DeviceError: the device can't go on.
            SelfCheckError: rows came out unfit, and so does what the target computes of the canary.
        """
        held, attempt, started_at = self._held[claim.shard], uuid.uuid4().hex, now()
        if held.outcome is not None:
            return held.outcome
        held.attempt, held.clock = attempt, Clock()

        def on_progress(num_rows: int, num_tokens: int) -> None:
            held.num_rows, held.num_tokens = num_rows, num_tokens

        result = self._extract(held, on_progress)
        if result.refused:  # let it not be the device that is unfit
            with self.extractor.device_lock:
                self.self_check()
        outcome = Outcome(
            kind="committed",
            shard=claim.shard,
            claim=claim.number,
            attempt=attempt,
            lane=self.name,
            host=host_name(),
            device=device_name(self.device),
            environment=self.target.environment(),
            started_at=started_at,
            ended_at=now(),
            **vars(result),
        )
        with self.clock.spent("waiting for the store"):
            try:
                held.outcome = self.catalog.commit(claim, outcome)
            except ClaimLostError:
                self._remove(claim, attempt)
                raise
        return held.outcome

    def _remove(self, claim: Claim, attempt: str) -> None:
        """Delete the files of a try that will never be committed; what stays is garbage for `layertap gc`."""
        prefix = self.catalog.attempt_prefix(self.plan.plan_id, claim.shard, attempt)
        with contextlib.suppress(LayertapError):
            self.catalog.store.delete([found.path for found in self.catalog.store.list(prefix)])

    def _extract(self, held: _Held, on_progress: Callable[[int, int], None]) -> ShardResult:
        claim, attempt = held.claim, held.attempt
        with self.clock.spent("waiting for data"):
            rows = self.catalog.shard_rows(self.plan.plan_id, claim.shard, self.plan)
        try:
            return self.extractor.extract_shard(
                rows,
                self.catalog.attempt_prefix(self.plan.plan_id, claim.shard, attempt),
                on_progress=on_progress,
                should_stop=self.check_stopped,
                clock=held.clock,
            )
        except Exception as error:
            if not isinstance(error, StoreError):
                self._remove(claim, attempt)
            if is_context_fatal(error):
                held.has_killed = True
                raise DeviceError(f"{device_name(self.device)} is lost to this process: {error}") from error
            raise

    def let_go(self, claim: Claim) -> Outcome | None:
        """Stop beating the claim, whose shard has an outcome; returns it if it is this lane's."""
        self._failures_in_a_row = 0
        return self._pop(claim).outcome

    def give_back(self, claim: Claim) -> Outcome | None:
        """Let go of a claim through no fault of its shard, which then waits; its outcome if it has one."""
        held = self._pop(claim)
        if held.outcome is None:
            self.catalog.release(claim)
        return held.outcome

    def excuse(self, claim: Claim) -> bool:
        """Give back a claim whose shard failed for the store's sake, if that answers again by now.

        Returns:
            Whether the claim was given back: not if the same shard meets it a second time.

        Raises:
            StoreError: the store still fails.
        """
        probe(self.catalog.store)
        if claim.shard in self._excused:
            return False
        self._excused.add(claim.shard)
        self.give_back(claim)
        return True

    def _pop(self, claim: Claim) -> _Held:
        held = self._held.pop(claim.shard)
        self._num_tokens_let_go += held.num_tokens
        return held

    def fail(self, claim: Claim, error: BaseException) -> None:
        """Record why the shard failed and let go of it; after two failures in a row, doubt the target.

        Raises:
            SelfCheckError: the target no longer computes what it should.
        """
        held = self._pop(claim)
        self._failed_here.add(claim.shard)
        self._record(held, error)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_BEFORE_SELF_CHECK:
            with self.extractor.device_lock:
                self.self_check()

    def _record(self, held: _Held, error: BaseException) -> None:
        failure = {
            "lane": self.name,
            "host": host_name(),
            "device": device_name(self.device),
            "error": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(error)),
            "log": self._log_tail.text,
            "claim": held.claim.number,
            "attempt": held.attempt,
            "num_rows": held.num_rows,
            "failed_at": now(),
        }
        self.catalog.fail(held.claim, failure)

    def _end_wedged(self, reason: str) -> None:
        """Record what hangs, give the rest back, and end the process: its shards may be claimed at once."""
        log.critical("%s: %s", self.device, reason)  # the device's name may be asked of the device
        in_hand = dict(self._held)
        hung = blamed({shard: held.clock for shard, held in in_hand.items()})
        for shard, held in in_hand.items():
            try:
                if shard == hung:
                    self._record(held, DeviceError(f"{device_name(self.device)}: {reason}"))
                else:
                    self.catalog.release(held.claim)
            except Exception:  # whatever it is, the process must end
                log.warning("can't tell why shard %d is let go", shard, exc_info=True)
        kill_process_group()

    def check_stopped(self) -> None:
        """Raise StoppedError when the run was told to stop or the lane is closing."""
        if self._stopped.is_set() or self._ending.is_set():
            raise StoppedError(f"plan {self.plan.plan_id} was told to stop")

    def _beat_until_closed(self) -> None:
        counter = 0
        while not self._ending.wait(BEAT_S):
            counter += 1
            self._unbeaten_since = self._unbeaten_since or time.monotonic()
            try:
                self._beat(counter)
                self._unbeaten_since = None
            except Exception:  # whatever it is, silence would look like death
                log.warning("a beat failed, the next one follows in %g s", BEAT_S, exc_info=True)

    def _look_for_stop(self) -> bool:
        if self.catalog.stopping(self.plan.plan_id, self.run):
            self._stopped.set()
        return self._stopped.is_set()

    def _beat(self, counter: int) -> None:
        self._look_for_stop()
        for held in list(self._held.values()):
            progress = {"counter": counter, "num_tokens": held.num_tokens, "num_rows": held.num_rows}
            self.catalog.beat(held.claim, {**progress, "lane": self.name, "beat_at": now()})
        self._note()

    def _note(self) -> None:
        """Tell in the store how the lane does."""
        num_tokens = sum(held.num_tokens for held in list(self._held.values()))
        self.record: LaneRecord = self._lane_log.note(self._num_tokens_let_go + num_tokens)

    def _note_last(self) -> None:
        with contextlib.suppress(LayertapError):  # the last beat told nearly as much
            self._note()

    def end(self) -> None:
        """Have shards in flight stop at their next batch, and nothing wait for a store that fails."""
        self._ending.set()

    def close(self) -> None:
        """End the lane's threads, give back the shards in hand, and let go of the device.

        Not the shard that took the device away: its claim goes stale, and the third such makes it failed.
        """
        self.end()
        self._exits.close()
        with contextlib.suppress(LayertapError):  # else the claims go stale, which is only slower
            for held in self._held.values():
                if held.outcome is None and not held.has_killed:
                    self.catalog.release(held.claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
