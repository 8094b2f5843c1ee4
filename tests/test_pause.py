"""A run waits for a store that fails, tries it with bounded waits, and ends when that lasts too long."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from layertap.errors import NotFoundError, StoreError, StoreRefusedError
from layertap.pause import FIRST_WAIT_S, GIVE_UP_S, LONGEST_WAIT_S, StorePause
from layertap.store import Store


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def waiting(folder_store: Store, clock: list[float]) -> StorePause:
    return StorePause(folder_store, clock=lambda: clock[0])


@pytest.fixture
def full(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the disk have so many bytes free."""

    def is_full(num_free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=num_free))

    return is_full


def test_a_store_that_answers_is_not_waited_for(waiting: StorePause, folder_store: Store) -> None:
    with waiting.noted():
        waiting.probe()
    assert not waiting.reason
    assert folder_store.list("check") == []


def test_waits_grow_to_a_bound_and_begin_anew_after_a_commit(
    folder_store: Store, clock: list[float], full: Any
) -> None:
    waiting, waits = StorePause(folder_store, 1000, clock=lambda: clock[0]), []
    full(999)
    waiting.begin("lane-0 found no space")
    while len(waits) < 9:
        before = clock[0]
        while waiting.reason and clock[0] - before < 2 * LONGEST_WAIT_S:
            clock[0] += 1
            reason = waiting.reason = "mine"
            with waiting.noted():
                assert not waiting.is_over()
            if waiting.reason != reason:  # it was tried, and has said why it isn't over
                assert "free, and 0.0 GB are to be stored" in waiting.reason
                break
        waits.append(clock[0] - before)
    assert waits[:4] == [FIRST_WAIT_S * 2**k for k in range(4)] and max(waits) == waits[-1] == LONGEST_WAIT_S
    assert waiting.was_seen
    full(1000)
    clock[0] += LONGEST_WAIT_S
    assert waiting.is_over() and not waiting.reason
    waiting.note_committed(1)
    waiting.begin("again")
    clock[0] += FIRST_WAIT_S
    assert waiting.is_over()


def test_a_store_that_fails_for_too_long_without_a_commit_ends_the_run_with_its_words(
    waiting: StorePause, clock: list[float]
) -> None:
    waiting.begin("403 Forbidden")
    clock[0] = GIVE_UP_S
    waiting.begin("403 Forbidden")
    waiting.note_committed(1)
    clock[0] += 1
    waiting.begin("403 Forbidden")
    assert str(waiting) == "waiting for the store for 0 s now: 403 Forbidden"
    clock[0] += GIVE_UP_S + 1
    waiting.note_committed(1)
    told = "root has failed for 1 h 00 min, and no commit was seen meanwhile: 403 Forbidden.*press Retry"
    with pytest.raises(StoreRefusedError, match=told), waiting.noted():
        raise StoreError("403 Forbidden")


def test_what_is_about_one_object_is_not_waited_for(waiting: StorePause) -> None:
    with pytest.raises(NotFoundError), waiting.noted():
        raise NotFoundError("can't get plan.json")
    assert not waiting.reason


@pytest.mark.parametrize("sign", ["commits that can be read", "lanes at work"])
def test_a_run_with_signs_of_life_outlasts_a_store_that_fails_its_coordinator_alone(
    folder_store: Store, clock: list[float], full: Any, sign: str
) -> None:
    num_committed, are_at_work = [0], [True]
    waiting = StorePause(
        folder_store,
        1000,
        count_committed=lambda: num_committed[0],
        are_at_work=lambda: are_at_work[0] and sign == "lanes at work",
        clock=lambda: clock[0],
    )

    def try_again() -> None:
        clock[0] += GIVE_UP_S + 1
        with waiting.noted():
            waiting.is_over()

    full(0)
    waiting.begin("no space")
    for _ in range(3):
        num_committed[0] += sign != "lanes at work"
        try_again()
        assert waiting.reason
    are_at_work[0] = False
    with pytest.raises(StoreRefusedError, match="no commit was seen meanwhile"):
        try_again()


def test_what_is_done_in_spite_of_a_store_that_fails_is_done_once_it_answers(
    waiting: StorePause, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_twice() -> str:
        if len(told) < 2:
            raise StoreError("away")
        return "done"

    def sleep(wait_s: float) -> None:
        clock[0] += FIRST_WAIT_S

    told: list[str] = []
    monkeypatch.setattr("layertap.pause.time.sleep", sleep)
    assert waiting.outlast(fails_twice, told.append) == "done"
    assert told[0] == "waiting for the store for 0 s now: away"
    with pytest.raises(NotFoundError):
        waiting.outlast(lambda: waiting._store.get("nothing"), told.append)
