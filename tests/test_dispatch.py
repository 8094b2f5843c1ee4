"""Which lanes a coordinator sends, replaces and gives up, by what the store and Prefect say of them."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType

from flows import dispatch
from flows.dispatch import (
    GONE_S,
    IDLE_S,
    SPARE_DEATHS,
    START_S,
    STORE_FAILED,
    Lanes,
    LanesLostError,
)
from flows.extract import look
from layertap.pause import StorePause
from layertap.store import Store
from layertap.watch import RunProgress

RUNNING, PENDING = State(type=StateType.RUNNING), State(type=StateType.PENDING)
BLAMES_STORE = State(type=StateType.FAILED, name=STORE_FAILED, message="no space left")
CRASHED, COMPLETED = State(type=StateType.CRASHED, message="killed"), State(type=StateType.COMPLETED)


class OfflineLanes(Lanes):
    """Lanes whose Prefect states the test sets."""

    def __init__(self, num_lanes: int) -> None:
        super().__init__(num_lanes, {}, [])
        self.ended: list[str] = []

    def _look(self) -> None:
        pass

    def _dispatch(self) -> None:
        flow_run = uuid4()
        self._names[flow_run] = f"lane-{len(self._states)}"
        self._states[flow_run] = RUNNING

    def _set_state(self, flow_run: UUID, state: State[Any]) -> None:
        """As Prefect does where nobody lives to carry a Cancelling out."""
        self.ended.append(self._names[flow_run])
        self._states[flow_run] = state

    def becomes(self, name: str, state: State[Any]) -> None:
        self._states[next(k for k, n in self._names.items() if n == name)] = state


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(dispatch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(dispatch, "get_run_logger", lambda: logging.getLogger("test"))
    return now


def seen(*working: str, claimable: int = 4, committed: int = 0, silent: tuple[str, ...] = ()) -> RunProgress:
    return RunProgress(
        num_tokens=1,
        num_tokens_done=0,
        num_rows=1,
        num_rows_done=0,
        tokens_per_s=0,
        samples_per_s=0,
        eta_s=None,
        shards_by_state={"committed": committed},
        num_claimable=claimable,
        lanes=dict.fromkeys(working, 1),
        silent_lanes=frozenset(silent),
        shards=[],
    )


def test_as_many_lanes_as_asked_for_and_no_more_than_there_is_work_for(clock: list[float]) -> None:
    lanes = OfflineLanes(3)
    lanes.tend(seen(claimable=2))
    assert len(lanes._live()) == 2
    lanes.tend(seen("lane-0", "lane-1", claimable=5))
    assert len(lanes._live()) == 3


def test_a_dead_lane_is_replaced(clock: list[float]) -> None:
    lanes = OfflineLanes(2)
    lanes.tend(seen())
    lanes.becomes("lane-0", CRASHED)
    lanes.tend(seen("lane-1"))
    assert [lanes._names[k] for k in lanes._live()] == ["lane-1", "lane-2"]


def test_a_lane_whose_flow_run_was_deleted_is_neither_replaced_nor_ended(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = OfflineLanes(2)
    lanes.tend(seen())
    _, kept = lanes._states
    monkeypatch.setattr(dispatch, "get_client", lambda **_: nullcontext())
    monkeypatch.setattr(
        dispatch, "read_flow_runs", lambda *_: [FlowRun(id=kept, flow_id=uuid4(), state=RUNNING)]
    )
    Lanes._look(lanes)
    lanes.tend(seen("lane-1"))
    assert lanes._live() == [kept]
    with lanes:
        lanes.becomes("lane-1", COMPLETED)
    assert lanes.ended == []


def test_a_lane_with_stale_claims_is_given_up_and_an_idle_one_beside_it_is_not(clock: list[float]) -> None:
    lanes = OfflineLanes(2)
    lanes.tend(seen())
    lanes.tend(seen("lane-0", "lane-1"))
    lanes.tend(seen(claimable=1, silent=("lane-1",)))
    assert lanes.ended == ["lane-1"]


def test_a_lane_that_was_given_up_and_never_ends_is_ended_for_it_and_counts_once(clock: list[float]) -> None:
    lanes = OfflineLanes(1)
    lanes.tend(seen())
    lanes.tend(seen("lane-0"))
    lanes.tend(seen(silent=("lane-0",)))
    (lost, state), *_ = lanes._states.items()
    assert state.is_cancelling()
    clock[0] = GONE_S + 1
    lanes.tend(seen("lane-1"))
    assert lanes._states[lost].is_crashed()
    assert (lanes._num_dead(), len(lanes._live())) == (1, 1)


def test_a_lane_that_never_claims_though_shards_wait_is_given_up(clock: list[float]) -> None:
    lanes = OfflineLanes(2)
    lanes.tend(seen())
    lanes.tend(seen("lane-1"))
    clock[0] = IDLE_S - 1
    lanes.tend(seen("lane-1"))
    assert lanes.ended == []
    clock[0] = IDLE_S + 1
    lanes.tend(seen("lane-1"))
    assert lanes.ended == ["lane-0"] and [lanes._names[k] for k in lanes._live()] == ["lane-1", "lane-2"]


def test_a_lane_between_two_shards_or_without_work_is_not_given_up(clock: list[float]) -> None:
    lanes = OfflineLanes(1)
    lanes.tend(seen())
    for clock[0] in range(0, 4 * int(IDLE_S), 600):
        lanes.tend(seen("lane-0") if clock[0] % 1200 else seen())
    for clock[0] in range(4 * int(IDLE_S), 8 * int(IDLE_S), 600):
        lanes.tend(seen(claimable=0))
    assert lanes.ended == []


def test_a_lane_whose_worker_died_while_starting_it_is_given_up(clock: list[float]) -> None:
    lanes = OfflineLanes(2)
    lanes.tend(seen())
    lanes.becomes("lane-0", PENDING)
    lanes.tend(seen("lane-1"))
    clock[0] = START_S + 1
    lanes.tend(seen("lane-1"))
    assert lanes.ended == ["lane-0"]


def test_a_run_without_lanes_is_given_up_with_their_last_words(clock: list[float]) -> None:
    lanes = OfflineLanes(1)
    lanes.tend(seen())
    lanes.tend(seen("lane-0"))
    with pytest.raises(LanesLostError, match="no lane is left; the last ends: lane-3 .*killed"):
        for number in range(1 + SPARE_DEATHS + 1):
            lanes.becomes(f"lane-{number}", CRASHED)
            lanes.tend(seen())


def test_lanes_that_gave_back_what_they_held_before_anybody_looked_have_worked_if_shards_were_committed(
    clock: list[float],
) -> None:
    lanes = OfflineLanes(2)
    lanes.tend(seen(committed=3))
    lanes.tend(seen(committed=14))
    for name in ("lane-0", "lane-1"):
        lanes.becomes(name, CRASHED)
    lanes.tend(seen(committed=14))
    assert [lanes._names[k] for k in lanes._live()] == ["lane-2", "lane-3"]


def test_what_earlier_runs_committed_excuses_no_lane(clock: list[float]) -> None:
    lanes = OfflineLanes(1)
    lanes.tend(seen(committed=3))
    lanes.becomes("lane-0", CRASHED)
    with pytest.raises(LanesLostError):
        lanes.tend(seen(committed=3))


def test_lanes_that_worked_and_died_since_the_store_was_looked_at_are_replaced(
    clock: list[float], folder_store: Store
) -> None:
    looks = [replace(seen(), shards_by_state={"waiting": 9 - k, "committed": k}) for k in (0, 5)]
    lanes = OfflineLanes(1)
    lanes.tend(seen())
    lanes.becomes("lane-0", CRASHED)
    run: Any = SimpleNamespace(check_stopped=lambda: None)
    watch: Any = SimpleNamespace(poll=lambda: looks.pop(0))
    board: Any = SimpleNamespace(show=lambda *_, **__: None)
    assert not look(run, watch, lanes, StorePause(folder_store, 0), board)
    assert len(lanes._live()) == 1


def test_the_store_is_tried_while_a_lane_is_silent_and_no_more_once_its_end_is_known(
    clock: list[float], folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Store] = []
    monkeypatch.setattr("layertap.pause.probe", tries.append)
    progress = replace(seen(silent=("lane-0",)), shards_by_state={"failed": 1, "waiting": 4})
    lanes = OfflineLanes(1)
    lanes.tend(seen())
    lanes.tend(seen("lane-0"))
    run: Any = SimpleNamespace(check_stopped=lambda: None)
    watch: Any = SimpleNamespace(poll=lambda: progress)
    board: Any = SimpleNamespace(show=lambda *_, **__: None)
    for _ in range(3):
        assert not look(run, watch, lanes, StorePause(folder_store, 0), board)
    assert len(tries) == 1
    assert [lanes._names[k] for k in lanes._live()] == ["lane-1"]


def test_deaths_are_forgiven_when_a_shard_was_committed_since(clock: list[float]) -> None:
    lanes = OfflineLanes(1)
    lanes.tend(seen())
    lanes.tend(seen("lane-0"))
    for number in range(20):
        lanes.becomes(f"lane-{number}", CRASHED)
        lanes.tend(seen(committed=number + 1))
    assert len(lanes._live()) == 1


def test_lanes_that_completed_are_not_missed(clock: list[float]) -> None:
    lanes = OfflineLanes(2)
    lanes.tend(seen())
    lanes.becomes("lane-0", COMPLETED)
    lanes.tend(seen("lane-1", claimable=0))
    assert [lanes._names[k] for k in lanes._live()] == ["lane-1"]


def test_lanes_that_blame_the_store_are_heard_before_others_are_sent_and_never_count_as_dead(
    clock: list[float],
) -> None:
    lanes = OfflineLanes(1)
    lanes.tend(seen())
    lanes.tend(seen("lane-0"))
    for number in range(20):
        lanes.becomes(f"lane-{number}", BLAMES_STORE)
        lanes.tend(seen())
        assert lanes._live() == []
        assert lanes.hear() == f"lane-{number} StoreFailed: no space left" and lanes.hear() == ""
        assert lanes.excuse(is_true=False)[-1:] and lanes._num_dead() == 0
        lanes.tend(seen())
        assert len(lanes._live()) == 1


@pytest.mark.parametrize("is_true", [False, True])
def test_lanes_that_never_worked_are_believed_only_if_the_store_failed_here_too(
    clock: list[float], is_true: bool
) -> None:
    lanes = OfflineLanes(2)
    lanes.tend(seen())
    for name in ("lane-0", "lane-1"):
        lanes.becomes(name, BLAMES_STORE)
    lanes.tend(seen())
    assert lanes.hear().count("no space left") == 1
    assert sorted(lanes.excuse(is_true=is_true)) == ["lane-0", "lane-1"]
    if is_true:
        lanes.tend(seen())
        assert len(lanes._live()) == 2
    else:
        with pytest.raises(LanesLostError, match="no lane is left; .*StoreFailed: no space left"):
            lanes.tend(seen())
