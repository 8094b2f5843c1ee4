"""Whole runs whose store fails on the way: they wait, go on where they were, and charge nobody."""

import dataclasses
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.client.schemas.objects import State, StateType

from flows import dispatch
from flows.dispatch import STORE_FAILED
from flows.extract import look
from layertap import coordinator, pause, store_check
from layertap import lane as lane_module
from layertap.coordinator import Run
from layertap.errors import StoreError, StoreRefusedError
from layertap.lane import Lane
from layertap.lane_work import extract_in_threads
from layertap.object_server import ObjectServer, ServerPorts
from layertap.pause import StorePause
from layertap.retries import PATIENT
from layertap.s3 import Bucket
from layertap.shard_state import shard_state
from layertap.store import Store
from layertap.versions import Versions
from layertap.watch import RunProgress, Watch
from tasks.artifacts import ProgressBoard
from tests.conftest import BUCKET
from tests.models import saved, tiny_llama
from tests.proxy import Faults, Proxy
from tests.runs import assert_read_back, run_lane, save_rows, settings_for, some_rows
from tests.test_dispatch import COMPLETED, OfflineLanes

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
        name = f"lane-{len(self._states) - 1}"
        threading.Thread(target=self._work, args=(name,), daemon=True).start()

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


def look_with(run: Run, watch: Watch, lanes: ThreadLanes, waiting: StorePause, board: Board) -> bool:
    return look(run, watch, lanes, waiting, cast(ProgressBoard, board))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(lane_module, "BEAT_S", 0.2)
    monkeypatch.setattr(pause, "FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(pause, "LONGEST_WAIT_S", 0.5)
    monkeypatch.setattr(pause, "POLL_S", 0.1)
    for module in (coordinator, store_check):
        monkeypatch.setattr(module, "BRIEF", AWAY)


@dataclass
class Outage:
    """A store that can be made to fail, and to come back as it was."""

    store: Store
    begin: Callable[[], None]
    end: Callable[[], None]


def bucket_of(server: ObjectServer, bucket: str = BUCKET, **changes: Any) -> Store:
    settings = server.settings(bucket, prefix=f"root-{uuid.uuid4().hex[:8]}")
    return Store(Bucket(dataclasses.replace(settings, **changes), server.session()), AWAY)  # type: ignore[arg-type]


@contextmanager
def faulty(server: ObjectServer, folder: Path, faults: Faults) -> Iterator[Outage]:
    with Proxy(server.ports.s3).running() as proxy:
        store = bucket_of(server, endpoint_url=proxy.endpoint_url)
        yield Outage(
            store,
            lambda: setattr(proxy, "faults", faults),
            lambda: setattr(proxy, "faults", Faults()),
        )


@contextmanager
def without_bucket(server: ObjectServer, folder: Path) -> Iterator[Outage]:
    """The bucket is deleted, and made again with all that it held."""
    bucket, client, held = f"gone-{uuid.uuid4().hex[:8]}", server._client(), dict[str, bytes]()
    with Proxy(server.ports.s3).running() as proxy:
        store = bucket_of(server, bucket, endpoint_url=proxy.endpoint_url)
        client.create_bucket(Bucket=bucket)

        def begin() -> None:
            proxy.faults = Faults(forbidden=re.compile("PUT|POST"))  # what isn't copied must not be stored
            for found in client.list_objects_v2(Bucket=bucket).get("Contents", []):
                held[found["Key"]] = client.get_object(Bucket=bucket, Key=found["Key"])["Body"].read()
            client.delete_bucket(Bucket=bucket)
            proxy.faults = Faults()

        def end() -> None:
            client.create_bucket(Bucket=bucket)
            while held:
                key, data = held.popitem()
                client.put_object(Bucket=bucket, Key=key, Body=data)

        yield Outage(store, begin, end)


@contextmanager
def stopped(server: ObjectServer, folder: Path) -> Iterator[Outage]:
    """The server's process is ended, and started again when it is gone: another thread may end it."""
    ports, one_at_a_time = ServerPorts.free(), threading.Lock()
    with_own = [ObjectServer.start(folder, ports=ports, buckets=[BUCKET])]

    def stop() -> None:
        with one_at_a_time:
            with_own[0].stop()

    def start_again() -> None:
        with one_at_a_time:
            with_own.append(ObjectServer.start(folder, ports=ports))

    try:
        yield Outage(bucket_of(with_own[0]), stop, start_again)
    finally:
        with_own[-1].stop()


def refused(server: ObjectServer, folder: Path) -> AbstractContextManager[Outage]:
    return faulty(server, folder, Faults(forbidden=re.compile("PUT")))


def overloaded(server: ObjectServer, folder: Path) -> AbstractContextManager[Outage]:
    return faulty(server, folder, Faults(slow_down=1.0))


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        (refused, "AccessDenied"),
        (overloaded, "SlowDown"),
        (without_bucket, "NoSuchBucket"),
        (stopped, "error sending request"),
    ],
)
def test_a_run_whose_store_fails_waits_goes_on_and_charges_nobody(
    object_server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[ObjectServer, Path], AbstractContextManager[Outage]],
    told: str,
) -> None:
    rows, model = some_rows(60), tiny_llama()
    settings = settings_for(save_rows(rows, tmp_path / "rows"), saved(model, tmp_path / "target"))
    with failing(object_server, tmp_path / "server") as outage:
        run, board = Run.prepare(outage.store, settings), Board()
        watch, lanes = run.watch(), ThreadLanes(run, outage.store)
        waiting, has_ended = run.pause(lanes.are_at_work), False
        _after_the_first_data(monkeypatch, outage.begin)
        while not look_with(run, watch, lanes, waiting, board):
            time.sleep(0.1)
            if len(board.waits) > 3 and not lanes._live() and not has_ended:
                assert told in board.waits[-1]
                outage.end()
                has_ended = True
        run.publish(watch).check(0.0)
        assert_read_back(outage.store, rows, model)
        assert run.plan is not None
        statuses = [shard_state(names) for names in run.catalog.snapshot(run.plan.plan_id).names.values()]
    assert {wait[:26] for wait in board.waits} == {"waiting for the store for "}
    assert len(lanes._states) >= 2 and lanes._num_dead() == 0
    assert {(status.num_failures, status.num_deaths) for status in statuses} == {(0, 0)}


@pytest.mark.parametrize(("failing", "told"), [(overloaded, "SlowDown"), (stopped, "error sending request")])
def test_a_run_that_starts_while_its_store_is_away_waits_for_it_and_says_so(
    object_server: ObjectServer,
    tmp_path: Path,
    failing: Callable[[ObjectServer, Path], AbstractContextManager[Outage]],
    told: str,
) -> None:
    settings = settings_for(
        save_rows(some_rows(5), tmp_path / "rows"), saved(tiny_llama(), tmp_path / "target")
    )
    waits = list[str]()
    with failing(object_server, tmp_path / "server") as outage:

        def show(why: str) -> None:
            waits.append(why)
            if len(waits) == 3:
                outage.end()

        outage.begin()
        run = Run.prepare(outage.store, settings, show=show)
        assert run.plan is not None and run.catalog.plans() == [run.plan.plan_id]
    assert re.match(f"waiting for the store for .* fails at put: .*{told}", waits[0])


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (Faults(forbidden=re.compile("PUT")), "AccessDenied"),
        (Faults(refuses_checksums=True), "set request_checksum_calculation to when_required"),
        (Faults(ignores_conditions=True), "takes no notice of `If-None-Match"),
    ],
)
@pytest.mark.parametrize("is_away_first", [False, True])
def test_a_run_waits_for_no_store_that_refuses_its_checks(
    object_server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    told: str,
    is_away_first: bool,
) -> None:
    monkeypatch.setattr(pause, "GIVE_UP_S", 0.0)
    settings = settings_for(
        save_rows(some_rows(5), tmp_path / "rows"), saved(tiny_llama(), tmp_path / "target")
    )
    waits = list[str]()
    with Proxy(object_server.ports.s3, Faults(slow_down=1.0) if is_away_first else faults).running() as proxy:
        store = bucket_of(object_server, endpoint_url=proxy.endpoint_url)

        def show(why: str) -> None:
            waits.append(why)
            proxy.faults = faults

        with pytest.raises(StoreError, match=told):
            Run.prepare(store, settings, show=show)
    assert all("SlowDown" in wait for wait in waits) and bool(waits) == is_away_first


def _after_the_first_data(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    todo, put = [do], Store.put

    def noticed(self: Store, path: str, *arguments: Any, **options: Any) -> None:
        put(self, path, *arguments, **options)
        if "/data/" in path and todo:
            todo.pop()()

    monkeypatch.setattr(Store, "put", noticed)


def test_a_coordinator_that_alone_cannot_reach_the_store_does_not_end_lanes_that_work(
    object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "GIVE_UP_S", 0.0)
    rows, model = some_rows(60), tiny_llama()
    settings = settings_for(save_rows(rows, tmp_path / "rows"), saved(model, tmp_path / "target"))
    with faulty(object_server, tmp_path, Faults(forbidden=re.compile("."))) as outage:
        run, board = Run.prepare(outage.store, settings), Board()
        assert isinstance(outage.store._root, Bucket)
        there = dataclasses.replace(outage.store._root.settings, endpoint_url=object_server.endpoint_url)
        lanes = ThreadLanes(run, Store.s3(there, object_server.session()))
        watch, waiting = run.watch(), run.pause(lanes.are_at_work)
        assert not look_with(run, watch, lanes, waiting, board)
        outage.begin()
        while lanes._live():
            look_with(run, watch, lanes, waiting, board)
            time.sleep(0.05)
        assert "AccessDenied" in board.waits[-1]
        with pytest.raises(StoreRefusedError, match="no commit was seen meanwhile"):
            for _ in range(100):
                look_with(run, watch, lanes, waiting, board)
                time.sleep(0.05)
        outage.end()
        run.publish().check(0.0)
        assert_read_back(outage.store, rows, model)


class Flaky(Store):
    """A folder one of whose requests fails, before it is done or after."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lock = threading.Lock()
        self._left, self._when = 0, ""

    def fail(self, number: int, when: str) -> None:
        """Fail at the request of this number from now on, 1 for the next."""
        self._left, self._when = number, when

    def mend(self) -> bool:
        """Fail no more; returns whether it has failed."""
        has_failed, self._left = self._left <= 0, 0
        return has_failed

    def with_retry(self, retry: Any) -> Store:
        return self

    @contextmanager
    def _mapped(self, verb: str, path: str) -> Iterator[None]:
        with self._lock:
            self._left -= 1
            fails = self._left == 0
        if fails and self._when == "before":
            raise StoreError(f"can't {verb} {path}: away")
        with super()._mapped(verb, path):
            yield
        if fails:
            raise StoreError(f"can't {verb} {path}: its reply was lost")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_is_planned_and_published_once_wherever_its_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    rows, model = some_rows(30), tiny_llama()
    settings = settings_for(save_rows(rows, tmp_path / "rows"), saved(model, tmp_path / "target"))
    monkeypatch.setattr(pause, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(pause, "POLL_S", 0.0)
    waits, number = list[str](), 0
    checked = coordinator._checked

    def fails_behind_the_checks(store: Flaky, *arguments: Any) -> Any:
        found = checked(store, *arguments)
        store.fail(number, when)
        return found

    monkeypatch.setattr(coordinator, "_checked", fails_behind_the_checks)
    has_failed = True
    while has_failed:
        number, store = number + 1, Flaky(tmp_path / f"root-{number}")
        run = Run.prepare(store, settings, show=waits.append)
        has_failed = store.mend()
        assert run.plan is not None and run.catalog.plans() == [run.plan.plan_id]
        assert len(store.list("runs")) == 1
    assert 10 < len(waits) < number

    run_lane(store, run.catalog.plans()[0], settings.target)
    watch, number, has_failed = run.watch(), 0, True
    watch.poll()
    while has_failed:
        number += 1
        store.delete([o.path for folder in ("versions", "reports") for o in store.list(folder)])
        store.fail(number, when)
        report = run.pause().outlast(lambda: run.publish(watch), waits.append)
        has_failed = store.mend()
        assert report.version.complete and not report.missing
        assert Versions(store).numbers() == [report.version.number] == [1]
    assert number > 20
    assert_read_back(store, rows, model)
