"""Lanes share shards through the store, take over from the dead, and doubt themselves."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load, save

from layertap import lane as lane_module
from layertap.canary import CANARY
from layertap.catalog import Claim
from layertap.coordinator import Run
from layertap.errors import (
    DeviceError,
    SelfCheckError,
    StoppedError,
    StoreError,
    StoreRefusedError,
    TargetError,
)
from layertap.lane import Lane
from layertap.lane_check import checked_device
from layertap.lane_work import extract_in_threads, work_through
from layertap.progress import SPENT_ON, Clock
from layertap.shard_state import ShardState, ShardStatus, shard_state
from layertap.store import Store
from layertap.target import Target
from layertap.target_files import TargetFiles
from tests.models import saved, tiny_llama
from tests.runs import assert_read_back, run_lane, save_rows, settings_for, some_rows


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def target(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(model, tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(folder_store: Store, tmp_path: Path, target: str) -> Run:
    return Run.prepare(folder_store, settings_for(save_rows(some_rows(60), tmp_path / "rows"), target))


@pytest.fixture
def plan_id(run: Run) -> str:
    assert run.plan is not None
    return run.plan.plan_id


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "BEAT_S", 0.2)


def opened(store: Store, plan_id: str, target: str, name: str, *, run_id: str = "run") -> Lane:
    lane = Lane.open(store, plan_id, run=run_id, target=target, name=name)
    assert lane is not None
    return lane


def test_a_lane_without_work_loads_no_target(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    run_lane(folder_store, plan_id, target)
    assert Lane.open(folder_store, plan_id, run="run", target="there is no such target", name="late") is None


def test_the_shard_of_a_dead_lane_is_taken_over(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    dead = run.catalog.claim(plan_id, 0, 1, lane="dead", details={})
    assert dead is not None
    report = run_lane(folder_store, plan_id, target)
    taken = next(outcome for outcome in report.committed if outcome.shard == 0)
    assert taken.claim == 2
    run.publish().check(0.0)


def test_a_lane_finishes_a_plan_whose_record_is_damaged_meanwhile(
    run: Run, folder_store: Store, plan_id: str, target: str, model: Any
) -> None:
    with opened(folder_store, plan_id, target, "lane-0") as lane:
        folder_store.put(f"plans/{plan_id}/plan.json", b"")
        assert not extract_in_threads(lane).failed
    run.publish().check(0.0)
    assert_read_back(folder_store, some_rows(60), model)


def test_the_shard_of_a_lane_that_beats_is_left_alone(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    held = run.catalog.claim(plan_id, 0, 1, lane="busy", details={})
    assert held is not None
    ending = threading.Event()

    def beat() -> None:
        while not ending.wait(0.1):
            run.catalog.beat(held, {})

    beats = threading.Thread(target=beat)
    beats.start()
    report = run_lane(folder_store, plan_id, target)
    ending.set()
    beats.join()
    assert 0 not in [outcome.shard for outcome in report.committed]


def test_stop_ends_a_lane_and_gives_its_shards_back(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    with opened(folder_store, plan_id, target, "lane-0", run_id=run.run_id) as lane:
        claim = lane.claim()
        assert claim is not None
        run.stop()
        assert lane._stopped.wait(5)
        with pytest.raises(StoppedError, match=f"plan {plan_id} was told to stop"):
            lane.extract(claim)
        with pytest.raises(StoppedError):
            extract_in_threads(lane)
    assert {row["state"] for row in run.watch().poll().shards} == {ShardState.WAITING}


def test_a_failure_is_recorded_and_the_shard_tried_again(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    with opened(folder_store, plan_id, target, "lane-0") as lane:
        honest = lane.extract
        tries: list[int] = []

        def once_broken(claim: Any) -> Any:
            if claim.shard == 1 and not tries:
                tries.append(claim.number)
                raise RuntimeError("a bug")
            return honest(claim)

        lane.extract = once_broken  # type: ignore[method-assign]
        report = extract_in_threads(lane)
    assert report.failed == {1: "RuntimeError: a bug"}
    failure = run.catalog.last_failure(plan_id, 1, shard_state(run.catalog.snapshot(plan_id).names[1]))
    assert failure["lane"] == "lane-0" and "once_broken" in failure["traceback"]
    assert run.catalog.outcome(plan_id, 1).claim == 2
    run.publish().check(0.0)


def test_two_failures_in_a_row_send_the_lane_to_its_self_check(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    with opened(folder_store, plan_id, target, "lane-0") as lane:

        def broken(claim: Any) -> Any:
            raise RuntimeError("illegal memory access")

        def doubtful() -> None:
            raise SelfCheckError("layer_0: not finite")

        lane.extract = broken  # type: ignore[method-assign]
        lane.self_check = doubtful  # type: ignore[method-assign]
        with pytest.raises(SelfCheckError, match="layer_0: not finite"):
            extract_in_threads(lane)


def test_a_shard_whose_scheduler_fails_is_given_back_and_not_blamed(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    tries: list[int] = []

    def submit(claim: Claim) -> Future[Any]:
        future: Future[Any] = Future()
        tries.append(claim.shard)
        if tries == [claim.shard]:
            future.set_exception(ConnectionError("the scheduler is away"))
        else:
            future.set_result(lane.extract(claim))
        return future

    with opened(folder_store, plan_id, target, "lane-0") as lane:
        report = work_through(lane, submit, no_fault=(ConnectionError,))
    assert run.plan is not None
    assert (len(report.committed), report.failed) == (len(run.plan.shards), {})
    names = run.catalog.snapshot(plan_id).names[0]
    assert "release-1" in names and "claim-2" in names


def test_a_shard_whose_scheduler_fails_after_its_commit_counts_as_committed(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    def submit(claim: Claim) -> Future[Any]:
        future: Future[Any] = Future()
        lane.extract(claim)
        future.set_exception(ConnectionError("the scheduler is away"))
        return future

    with opened(folder_store, plan_id, target, "lane-0") as lane:
        report = work_through(lane, submit, no_fault=(ConnectionError,))
    assert run.plan is not None
    assert sorted(outcome.shard for outcome in report.committed) == list(range(len(run.plan.shards)))
    assert report.num_tokens == run.plan.num_tokens and report.failed == {}
    assert all(set(names) == {"claim-1", "outcome"} for names in run.catalog.snapshot(plan_id).names.values())


def test_a_lane_whose_device_others_fill_ends_and_no_shard_is_blamed(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    with (
        opened(folder_store, plan_id, target, "lane-0") as lane,
        pytest.raises(DeviceError, match="no memory"),
    ):

        def leaking(claim: Any) -> Any:
            raise DeviceError("cuda has no memory for a row that it had memory for before")

        lane.extract = leaking  # type: ignore[method-assign]
        extract_in_threads(lane)
    assert {(row["state"], row["failures"]) for row in run.watch().poll().shards} == {(ShardState.WAITING, 0)}


def test_a_shard_that_takes_the_gpu_away_has_failed_after_three_lanes_and_no_other_has(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    poison = run.catalog.shard_rows(plan_id, 0).tokens(0).tolist()
    num_lost = 0
    while lane := Lane.open(folder_store, plan_id, run="run", target=target, name=f"lane-{num_lost}"):
        honest = lane.target.tap

        def tap(ids: torch.Tensor, honest: Any = honest) -> Any:
            if any(row[: len(poison)].tolist() == poison for row in ids):
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            return honest(ids)

        lane.target.tap = tap  # type: ignore[method-assign]
        with pytest.raises(DeviceError, match="is lost to this process"), lane:
            extract_in_threads(lane)
        num_lost += 1
        assert num_lost <= 3
    names = run.catalog.snapshot(plan_id).names
    assert sorted(names[0]) == ["claim-1", "claim-2", "claim-3"]
    assert shard_state(names[0], [3]).state == ShardState.FAILED
    assert all("outcome" in names[shard] for shard in names if shard)


def test_a_shard_that_a_lane_died_with_is_taken_last_and_held_alone(
    run: Run, plan_id: str, folder_store: Store, target: str
) -> None:
    for shard in (0, 1):
        assert run.catalog.claim(plan_id, shard, 1, lane="dead", details={})
        taken_over = run.catalog.claim(plan_id, shard, 2, lane="stopped", details={})
        assert taken_over is not None
        run.catalog.release(taken_over)
    assert run.plan is not None
    with opened(folder_store, plan_id, target, "lane-0") as lane:
        together = list(iter(lane.claim, None))
        assert [claim.shard for claim in together] == list(range(2, len(run.plan.shards)))
        for claim in together:
            _finish(lane, claim)
        for shard in (0, 1):
            alone = lane.claim()
            assert alone is not None and alone.shard == shard and lane.claim() is None
            _finish(lane, alone)


def _finish(lane: Lane, claim: Claim) -> None:
    lane.extract(claim)
    lane.let_go(claim)


def test_a_lane_that_hangs_dies_even_if_it_cannot_say_why(
    run: Run, plan_id: str, folder_store: Store, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    ends: list[str] = []
    with opened(folder_store, plan_id, target, "lane-0") as lane, monkeypatch.context() as patch:
        assert lane.claim() is not None
        patch.setattr(lane_module, "kill_process_group", lambda: ends.append("killed"))
        patch.setattr(lane.catalog, "release", broken)
        lane._end_wedged("the device hangs")
    assert ends == ["killed"]


def test_a_full_store_ends_the_lane_and_no_shard_is_charged_even_if_nothing_can_be_given_back(
    run: Run, plan_id: str, folder_store: Store, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Store, path: str, data: Any, **_: Any) -> None:
        raise StoreRefusedError("can't put: no space left")

    with (
        pytest.raises(StoreRefusedError, match="no space"),
        monkeypatch.context() as patch,
        opened(folder_store, plan_id, target, "full") as lane,
    ):
        honest = lane.extract

        def extract(claim: Claim) -> Any:
            patch.setattr(Store, "put", refused)
            patch.setattr(Store, "create", refused)
            return honest(claim)

        lane.extract = extract  # type: ignore[method-assign]
        extract_in_threads(lane)
    held = [k for k, names in run.catalog.snapshot(plan_id).names.items() if "claim-1" in names]
    assert held
    taken_over = run.catalog.claim(plan_id, held[0], 2, lane="other", details={})
    assert taken_over is not None
    run.excuse(["full"])
    run.catalog.release(taken_over)
    assert {(s.state, s.num_failures, s.num_deaths) for s in _statuses(run, plan_id)} == {
        (ShardState.WAITING, 0, 0)
    }


def _statuses(run: Run, plan_id: str) -> list[ShardStatus]:
    return [shard_state(names) for names in run.catalog.snapshot(plan_id).names.values()]


def test_a_shard_that_met_a_store_which_was_away_is_given_back_once_and_then_charged(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    with opened(folder_store, plan_id, target, "lane-0") as lane:
        honest, num_tries = lane.extract, 0

        def twice_away(claim: Any) -> Any:
            nonlocal num_tries
            if claim.shard == 1 and (num_tries := num_tries + 1) <= 2:
                raise StoreError("the store was away")
            return honest(claim)

        lane.extract = twice_away  # type: ignore[method-assign]
        report = extract_in_threads(lane)
    assert report.failed == {1: "StoreError: the store was away"}
    names = run.catalog.snapshot(plan_id).names[1]
    assert {"release-1", "fail-2.lane-0", "outcome"} <= {*names}


def test_a_store_that_stays_away_ends_the_lane(
    run: Run, plan_id: str, folder_store: Store, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise StoreError("can't put: the store is away")

    with opened(folder_store, plan_id, target, "lane-0") as lane:
        lane.extract = away  # type: ignore[method-assign, assignment]
        with monkeypatch.context() as patch, pytest.raises(StoreError, match="the store is away"):
            patch.setattr("layertap.lane.probe", away)
            extract_in_threads(lane)
    assert {(s.state, s.num_failures, s.num_deaths) for s in _statuses(run, plan_id)} == {
        (ShardState.WAITING, 0, 0)
    }


def test_a_lane_whose_beats_do_not_get_through_takes_no_other_for_dead(
    run: Run,
    plan_id: str,
    folder_store: Store,
    target: str,
    fast_beats: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_module, "CUT_OFF_S", 0.0)
    assert run.catalog.claim(plan_id, 0, 1, lane="silent", details={})

    def stuck(counter: int) -> None:
        raise StoreError("can't put")

    with opened(folder_store, plan_id, target, "lane-0") as lane:
        honest, lane._beat = lane._beat, stuck  # type: ignore[method-assign]
        time.sleep(2 * lane_module.BEAT_S)
        looks = [lane._poll()[0] for _ in range(8) if time.sleep(lane_module.BEAT_S / 2) is None]
        assert set(looks) == {ShardState.CLAIMED}
        lane._beat = honest  # type: ignore[method-assign]
        assert lane.wait_for_work()
        while lane._poll()[0] != ShardState.STALE:
            time.sleep(lane_module.BEAT_S / 2)


def test_a_device_that_yields_nan_for_everything_ends_its_lane_and_settles_no_row(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    with (
        opened(folder_store, plan_id, target, "l") as lane,
        pytest.raises(SelfCheckError, match="not finite"),
    ):
        honest = lane.target.tap
        lane.target.tap = lambda ids: [state * torch.nan for state in honest(ids)]  # type: ignore[method-assign]
        extract_in_threads(lane)
    assert len(run.catalog.settled().keys) == 0


def test_rows_that_had_no_memory_are_computed_by_the_next_run_even_if_they_are_its_whole_plan(
    folder_store: Store, tmp_path: Path, target: str, model: Any, fast_beats: None
) -> None:
    rows = some_rows(3, longest=20)
    settings = settings_for(save_rows(rows, tmp_path / "rows"), target, max_refused_share=1.0)
    plan_ids = []
    for _ in range(2):
        run = Run.prepare(folder_store, settings)
        assert run.plan is not None and run.plan.num_rows == 3
        plan_ids.append(run.plan.plan_id)
        with opened(folder_store, run.plan.plan_id, target, "small") as lane:
            honest, lane.target.tap = lane.target.tap, _no_memory  # type: ignore[method-assign]
            lane.self_check = lambda: None  # type: ignore[method-assign]
            extract_in_threads(lane)
            lane.target.tap = honest  # type: ignore[method-assign]
        report = run.publish()
        assert report.version.complete and "tried again by the next run" in report.missing[0]
    run = Run.prepare(folder_store, settings)
    assert run.plan is not None
    run_lane(folder_store, run.plan.plan_id, target, "large")
    assert len({*plan_ids, run.plan.plan_id}) == 3
    run.publish().check(0.0)
    assert_read_back(folder_store, rows, model)
    assert Run.prepare(folder_store, settings).plan is None


def _no_memory(_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_shards_in_flight_have_ended_when_a_lane_has(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    ends: list[str] = []
    with opened(folder_store, plan_id, target, "l", run_id=run.run_id) as lane:
        honest = lane.extract

        def noted(claim: Any) -> Any:
            try:
                return honest(claim)
            except BaseException as error:
                ends.append(type(error).__name__)
                raise

        lane.extract = noted  # type: ignore[method-assign]
        real = lane.target.tap

        def slow(ids: Any) -> Any:
            run.stop()
            time.sleep(1.0)
            return real(ids)

        lane.target.tap = slow  # type: ignore[method-assign]
        with pytest.raises(StoppedError):
            extract_in_threads(lane)
        assert ends == ["StoppedError", "StoppedError"]


def test_a_lane_of_a_run_that_was_stopped_loads_no_target(
    run: Run, plan_id: str, folder_store: Store, fast_beats: None
) -> None:
    run.stop()
    with pytest.raises(StoppedError, match=f"run {run.run_id} was told to stop"):
        Lane.open(folder_store, plan_id, run=run.run_id, target="there is no such target", name="late")


def test_all_seconds_of_a_lane_are_accounted_for(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    before = time.perf_counter()
    with opened(folder_store, plan_id, target, "lane-0") as lane:
        after = time.perf_counter()
        seconds = extract_in_threads(lane).seconds
        assert set(seconds) <= set(SPENT_ON)
        assert {"loading", "self-check", "forward", "waiting for data", "waiting for the store"} <= set(
            seconds
        )
        now, total = time.perf_counter(), sum(lane.clock.seconds.values())
        assert now - after <= total <= time.perf_counter() - before


def test_a_lanes_start_counts_as_loading(
    plan_id: str, folder_store: Store, target: str, fast_beats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0

    @contextmanager
    def slowly(*args: Any, **kwargs: Any) -> Iterator[torch.device]:
        nonlocal seconds
        seconds += 100.0  # imports, the start of CUDA
        with checked_device(*args, **kwargs) as device:
            yield device

    monkeypatch.setattr(lane_module, "checked_device", slowly)
    monkeypatch.setattr(lane_module, "Clock", lambda: Clock(lambda: seconds))
    with opened(folder_store, plan_id, target, "lane-0") as lane:
        assert lane.clock.seconds == {"loading": 100.0}


def test_a_lane_that_waits_for_another_to_compile_does_not_compile(
    run: Run, plan_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be taken for hung when the other is."""
    assert run.plan is not None
    lane = Lane(run.catalog, run.plan, run="run", name="lane-0")
    compiles: list[bool] = []

    def note(**_: Any) -> None:
        compiles.append(lane.clock.open_s("compiling") > 0)

    @contextmanager
    def waited(_: Any) -> Iterator[None]:
        note()
        yield

    monkeypatch.setattr(lane_module, "one_compiles", waited)
    lane.device, lane.target = torch.device("cuda"), cast(Target, SimpleNamespace(compile=note))
    lane._compile()
    assert compiles == [False, True]


def test_a_task_repeated_after_its_commit_computes_nothing(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    with opened(folder_store, plan_id, target, "lane-0") as lane:
        claim = lane.claim()
        assert claim is not None
        first = lane.extract(claim)
        files = len(folder_store.list(f"plans/{plan_id}/data"))
        assert lane.extract(claim) == first
        assert len(folder_store.list(f"plans/{plan_id}/data")) == files
        lane.let_go(claim)
        work_through(lane, lambda c: pytest.fail("not reached") if c.shard == claim.shard else _done(lane, c))


def _done(lane: Lane, claim: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(lane.extract(claim))
    return future


def test_the_first_lane_stores_the_target_s_files(
    run: Run, plan_id: str, folder_store: Store, target: str, model: Any, fast_beats: None
) -> None:
    with opened(folder_store, plan_id, target, "lane-0"):
        files = TargetFiles(folder_store)
        assert files.record.target_identity == run.preview.spec.target_identity
        assert torch.equal(files.weight("lm_head"), model.lm_head.weight.cpu())


def test_a_lane_that_differs_from_the_canary_is_refused(
    run: Run, plan_id: str, folder_store: Store, target: str, fast_beats: None
) -> None:
    with opened(folder_store, plan_id, target, "lane-0"):
        pass
    canary = load(folder_store.get(CANARY))
    canary["layer_2"] = canary["layer_3"].clone()  # a layer off by one
    folder_store.delete([CANARY])
    folder_store.create(CANARY, save(canary))
    with pytest.raises(SelfCheckError, match="layer_2: .*canary|canary.*layer_2"):
        Lane.open(folder_store, plan_id, run="run", target=target, name="lane-1")


def test_another_model_of_the_same_shape_is_refused(
    run: Run, plan_id: str, folder_store: Store, model: Any, tmp_path: Path
) -> None:
    other = tiny_llama()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.add_(0.01)
    with pytest.raises(TargetError, match="but the extraction was made for"):
        Lane.open(folder_store, plan_id, run="run", target=saved(other, tmp_path / "other"), name="lane-0")
