"""The lanes of one coordinator: dispatched, counted, replaced when they die, taken back at the end."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.states import Cancelled, Cancelling, Crashed

from flows.flow_runs import read_flow_runs
from layertap.errors import LayertapError
from layertap.shard_state import ShardState
from layertap.watch import RunProgress
from tasks.artifacts import server_may_be_away

DEPLOYMENT = "extraction_lane/extraction-lane"

STORE_FAILED = "StoreFailed"
"""Name of the state of a lane that ended because the store failed as a whole."""

SPARE_DEATHS = 3
"""Lanes that may die between two commits, beyond one for each asked for; none if no lane ever worked."""

START_S = 300.0
"""Seconds from a worker's taking a lane to the lane's start, after which the worker must have died."""

IDLE_S = 1800.0
"""Seconds a lane may hold no shard while some wait; loading is shorter, so its host must have died."""

GONE_S = 60.0
"""Seconds a lane that was given up has to end by itself, after which its process must be gone."""

LAST_LANE_S = 60.0
"""Seconds that lanes have to end by themselves when no work is left."""


class LanesLostError(LayertapError):
    """No lane is left to go on with."""


class Lanes:
    """Lane runs in the work pool. A context manager: none of them outlives it.

    Whether a lane lives is judged by Prefect's state of its run and, where its host has gone down so that
    nobody reports it, by its claims in the store.
    """

    def __init__(self, num_lanes: int, parameters: Mapping[str, Any], tags: Sequence[str]) -> None:
        self._num_lanes = num_lanes
        self._parameters = parameters
        self._tags = list(tags)
        self._states: dict[UUID, State[Any]] = {}
        self._names: dict[UUID, str] = {}
        self._seen_working: set[str] = set()
        self._have_committed = False
        self._idle_since: dict[UUID, float] = {}
        self._lost: dict[UUID, float] = {}
        """Lanes that were given up, and when."""

        self._heard: set[UUID] = set()
        self._excused: set[UUID] = set()
        """Of lanes that blamed the store: those that were heard, and those that don't count as dead."""

        self._num_committed = self._num_forgiven = 0
        # Unique over coordinators and their retries: the store counts the lanes on which a shard failed.
        self._prefix = f"lane-{str(runtime.flow_run.id)[:8]}-{runtime.flow_run.run_count}"
        self._log = get_run_logger()

    def tend(self, progress: RunProgress) -> None:
        """Dispatch lanes while there is work for them, and none blames the store without having been heard.

        Raises:
            LanesLostError: no lane is left and too many have died to try another.
        """
        with server_may_be_away():
            self._look()
            self._end_lost(progress)
            self._bury(GONE_S)
            self._forgive(progress)
            if self._blaming() <= self._heard:
                for _ in range(self._num_missing(progress)):
                    self._dispatch()

    def are_at_work(self) -> bool:
        """Whether a lane runs, as Prefect last said."""
        with server_may_be_away():
            self._look()
        return any(self._states[k].is_running() for k in self._live())

    def seem_lost(self, progress: RunProgress) -> bool:
        """Whether a lane is silent that hasn't ended, as Prefect last said."""
        return any(self._names[k] in progress.silent_lanes for k in self._live())

    def hear(self) -> str:
        """What lanes said that have ended since because the store failed; empty if none has."""
        new = self._blaming() - self._heard
        self._heard |= new
        return "; ".join({str(self._states[k].message): self._last_word(k) for k in new}.values())

    def excuse(self, *, is_true: bool) -> list[str]:
        """Don't count as dead the lanes that blamed the store, if that is true or they had worked before.

        Returns:
            Their names.
        """
        if is_true or self._have_worked():
            self._excused |= self._heard
        return [self._names[k] for k in self._heard]

    def _blaming(self) -> set[UUID]:
        return {k for k, state in self._states.items() if state.name == STORE_FAILED}

    def _look(self) -> None:
        ids = [k for k, state in self._states.items() if not state.is_final()]
        with get_client(sync_client=True) as client:
            found = {run.id: run.state for run in _read(client, ids)}
        for k in ids:
            state = found.get(k) or Cancelled(message="its flow run was deleted")
            self._warn_of_change(k, state)
            self._states[k] = state

    def _warn_of_change(self, flow_run: UUID, state: State[Any]) -> None:
        name = self._names[flow_run]
        if state.is_failed() or state.is_crashed():
            self._log.warning("%s is dead: %s", name, state.message)
        elif state.name == "Late" != self._states[flow_run].name:
            self._log.warning("%s waits for a free worker; `layertap workers` starts some on a host", name)

    def _end_lost(self, progress: RunProgress) -> None:
        """Give up lanes that nobody reports dead: their claims went stale, or they never claim anything."""
        self._seen_working |= progress.lanes.keys()
        for k in self._live():
            name, state = self._names[k], self._states[k]
            if name in progress.silent_lanes:
                self._give_up(k, "its claims are stale")
            elif state.is_pending() and self._idle_s(k) > START_S:
                self._give_up(k, f"a worker took it but didn't start it within {START_S:g} s")
            elif state.is_scheduled() or name in progress.lanes or not progress.num_claimable:
                self._idle_since.pop(k, None)
            elif self._idle_s(k) > IDLE_S:
                self._give_up(k, f"it has claimed no shard for {IDLE_S:g} s, though some wait")

    def _idle_s(self, flow_run: UUID) -> float:
        now = time.monotonic()
        return now - self._idle_since.setdefault(flow_run, now)

    def _forgive(self, progress: RunProgress) -> None:
        """Forget deaths once a shard was committed after them: hosts come and go in a long run."""
        num_committed = progress.shards_by_state.get(ShardState.COMMITTED, 0)
        if num_committed > self._num_committed:
            self._have_committed |= bool(self._states)  # before any was sent, another run's did
            self._num_committed, self._num_forgiven = num_committed, self._num_dead()

    def _have_worked(self) -> bool:
        """Whether a lane ever did: between two looks one may claim, commit and give back all it holds."""
        return bool(self._seen_working) or self._have_committed

    def _num_dead(self) -> int:
        ended = {k for k, state in self._states.items() if state.is_failed() or state.is_crashed()}
        return len((ended | self._lost.keys()) - self._excused)

    def _give_up(self, flow_run: UUID, reason: str) -> None:
        self._log.warning("%s is lost: %s", self._names[flow_run], reason)
        self._lost[flow_run] = time.monotonic()
        self._cancel(flow_run)

    def _bury(self, patience_s: float) -> None:
        """End lanes that were given up and don't say that they ended: nobody is there to do it."""
        for k, since_s in self._lost.items():
            if not self._states[k].is_final() and time.monotonic() - since_s > patience_s:
                self._set_state(k, Crashed(message="its process was gone"))

    def _live(self) -> list[UUID]:
        return [k for k, state in self._states.items() if not state.is_final() and k not in self._lost]

    def _num_missing(self, progress: RunProgress) -> int:
        live = self._live()
        num_waiting = sum(self._names[k] not in self._seen_working for k in live)
        num_wanted = self._num_lanes - self._num_cancelled()
        num_dead = self._num_dead() - self._num_forgiven
        num_bearable = self._num_lanes + (SPARE_DEATHS if self._have_worked() else 0)
        if num_wanted > 0 and num_dead < num_bearable:
            return max(0, min(num_wanted - len(live), progress.num_claimable - num_waiting))
        if not live and not progress.lanes:
            raise LanesLostError(f"no lane is left; the last ends: {self._last_words()}")
        return 0

    def _num_cancelled(self) -> int:
        """Lanes that somebody cancelled or deleted by hand, and so doesn't want replaced."""
        return sum(state.is_cancelled() and k not in self._lost for k, state in self._states.items())

    def _last_words(self) -> str:
        """The last ends of lanes, one for each message."""
        ended = {state.message: self._last_word(k) for k, state in self._states.items()}
        return "; ".join(list(ended.values())[-3:])

    def _last_word(self, flow_run: UUID) -> str:
        return f"{self._names[flow_run]} {self._states[flow_run].name}: {self._states[flow_run].message}"

    def _dispatch(self) -> None:
        name = f"{self._prefix}-{len(self._states)}"
        started = run_deployment(
            DEPLOYMENT,
            parameters={**self._parameters, "name": name},
            flow_run_name=name,
            tags=self._tags,
            timeout=0,
            # A retried coordinator must get new lanes: the old key would give it the old, finished runs.
            idempotency_key=f"{runtime.flow_run.id}:{name}",
        )
        self._log.info("sent %s to the work pool", name)
        run = cast(FlowRun, started)
        assert run.state is not None
        self._names[run.id] = name
        self._states[run.id] = run.state

    def _cancel(self, flow_run: UUID) -> None:
        """End a lane. Cancelling would hang on one whose engine hasn't begun: nobody would carry it out."""
        if self._states[flow_run].is_running():
            self._set_state(flow_run, Cancelling())
        else:
            self._set_state(flow_run, Cancelled(message="not needed any more"))

    def _set_state(self, flow_run: UUID, state: State[Any]) -> None:
        with server_may_be_away(), get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run, state, force=state.is_final())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take back lanes that wait for a worker; working ones get a moment to end, except after an error."""
        with server_may_be_away():
            self._look()
            working = [k for k in self._live() if error is None and self._states[k].is_running()]
            for k in set(self._live()) - set(working):
                self._cancel(k)
            deadline = time.monotonic() + LAST_LANE_S
            while error is None and self._ending(working) and time.monotonic() < deadline:
                time.sleep(1.0)
                self._look()
            for k in set(working) & set(self._live()):
                self._cancel(k)
            if error is None:
                self._bury(0.0)

    def _ending(self, working: Sequence[UUID]) -> list[UUID]:
        """Of lanes that worked to the end or were given up, those that Prefect doesn't know to have ended."""
        return [k for k in (*working, *self._lost) if not self._states[k].is_final()]


def _read(client: SyncPrefectClient, ids: list[UUID]) -> list[FlowRun]:
    if not ids:
        return []
    return read_flow_runs(client, FlowRunFilter(id=FlowRunFilterId(any_=ids)))
