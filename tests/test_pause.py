"""A run waits for a store that fails, tries it with bounded waits, and ends when that lasts too long."""

import dataclasses
import logging
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect.client.schemas.objects import State, StateType

from flows import dispatch
from flows.dispatch import STORE_FAILED
from flows.extract import look
from layertap import coordinator, pause, store_check
from layertap import lane as lane_module
from layertap.coordinator import Run
from layertap.errors import NotFoundError, StoreError, StoreRefusedError
from layertap.lane import Lane
from layertap.lane_work import extract_in_threads
from layertap.object_server import ObjectServer
from layertap.pause import FIRST_WAIT_S, GIVE_UP_S, LONGEST_WAIT_S, StorePause
from layertap.retries import PATIENT
from layertap.s3 import Bucket
from layertap.shard_state import shard_state
from layertap.store import Store
from layertap.watch import RunProgress
from tasks.artifacts import ProgressBoard
from tests.conftest import BUCKET
from tests.models import saved, tiny_llama
from tests.proxy import Faults, Proxy
from tests.runs import assert_read_back, save_rows, settings_for, some_rows
from tests.test_dispatch import COMPLETED, OfflineLanes


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def waiting(folder_store: Store, clock: list[float]) -> StorePause:
    return StorePause(folder_store, 0, lambda: clock[0])


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
    waiting, waits = StorePause(folder_store, 1000, lambda: clock[0]), []
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
    told = "root has failed for 1 h 00 min, and no shard was committed meanwhile: 403 Forbidden.*press Retry"
    with pytest.raises(StoreRefusedError, match=told), waiting.noted():
        raise StoreError("403 Forbidden")


def test_what_is_about_one_object_is_not_waited_for(waiting: StorePause) -> None:
    with pytest.raises(NotFoundError), waiting.noted():
        raise NotFoundError("can't get plan.json")
    assert not waiting.reason


AWAY = {
    **PATIENT,
    "retry_timeout": timedelta(seconds=0.3),
    "backoff": {"base": 2, "init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(seconds=0.1)},
}
"""So little patience that a store which is away is soon given up."""


class ThreadLanes(OfflineLanes):
    """Lanes in threads, that end as their flow would let them."""

    def __init__(self, run: Run, store: Store) -> None:
        super().__init__(1)
        self._run, self._store = run, store

    def _dispatch(self) -> None:
        super()._dispatch()
        threading.Thread(target=self._work, args=(f"lane-{len(self._states) - 1}",)).start()

    def _work(self, name: str) -> None:
        assert self._run.plan is not None
        plan_id, target = self._run.plan.plan_id, self._run.preview.settings.target
        ends = COMPLETED
        try:
            lane = Lane.open(self._store, plan_id, run=self._run.run_id, target=target, name=name)
            if lane:
                with lane:
                    extract_in_threads(lane)
        except StoreError as error:
            ends = State(type=StateType.FAILED, name=STORE_FAILED, message=str(error))
        self.becomes(name, ends)


class Board:
    """What was shown of waiting."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def show(self, progress: RunProgress, *, last: bool = False) -> None:
        pass

    def show_waiting(self, why: str) -> None:
        self.waits.append(why)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(lane_module, "BEAT_S", 0.2)
    monkeypatch.setattr(pause, "FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(pause, "LONGEST_WAIT_S", 0.5)
    for module in (coordinator, store_check):
        monkeypatch.setattr(module, "BRIEF", AWAY)


@pytest.mark.parametrize(
    ("faults", "told"), [({"forbidden": re.compile("PUT")}, "AccessDenied"), ({"slow_down": 1.0}, "SlowDown")]
)
def test_a_run_whose_store_fails_waits_goes_on_and_charges_nobody(
    object_server: ObjectServer,
    tmp_path: Path,
    hurried: None,
    faults: dict[str, Any],
    told: str,
) -> None:
    with Proxy(object_server.ports.s3).running() as proxy:
        settings = object_server.settings(BUCKET, prefix=f"root-{uuid.uuid4().hex[:8]}")
        settings = dataclasses.replace(settings, endpoint_url=proxy.endpoint_url)
        store, model = Store(Bucket(settings, object_server.session()), AWAY), tiny_llama()  # type: ignore[arg-type]
        rows = some_rows(60)
        run = Run.prepare(
            store, settings_for(save_rows(rows, tmp_path / "rows"), saved(model, tmp_path / "target"))
        )
        proxy.faults.on_stored = _once("/data/", lambda: setattr(proxy, "faults", Faults(**faults)))
        board, watch, waiting, lanes = Board(), run.watch(), run.pause(), ThreadLanes(run, store)
        while not look(run, watch, lanes, waiting, cast(ProgressBoard, board)):
            time.sleep(0.1)
            if len(board.waits) > 3 and not lanes._live():
                proxy.faults = Faults()
        run.publish(watch).check(0.0)
        assert_read_back(store, rows, model)
    assert told in board.waits[-1] and board.waits[-1].startswith("waiting for the store for ")
    assert len(lanes._states) >= 2 and lanes._num_dead() == 0
    assert run.plan is not None
    statuses = [shard_state(names) for names in run.catalog.snapshot(run.plan.plan_id).names.values()]
    assert {(status.num_failures, status.num_deaths) for status in statuses} == {(0, 0)}


def _once(part: str, do: Callable[[], None]) -> Callable[[str], None]:
    todo = [do]

    def on_stored(path: str) -> None:
        if part in path and todo:
            todo.pop()()

    return on_stored
