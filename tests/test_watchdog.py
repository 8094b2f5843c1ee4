"""A lane whose device hangs ends itself, and says why."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import layertap.lane
from layertap import watchdog
from layertap.catalog import Catalog
from layertap.coordinator import Run
from layertap.lane import Lane
from layertap.lane_work import extract_in_threads
from layertap.progress import Clock, SpentOn
from layertap.shard_state import shard_state
from layertap.staging import Slot
from layertap.store import Store
from layertap.target import Target
from layertap.watchdog import START_S, WEDGED_S, Watchdog, blamed
from tests.models import saved, tiny_llama
from tests.runs import save_rows, settings_for, some_rows


class _FakeTime:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_pass_is_hung_after_five_minutes_or_twenty_times_the_mean() -> None:
    fake = _FakeTime()
    clock = Clock(fake)
    watchdog = Watchdog(clock, 1, fake)
    for _ in range(4):
        with clock.spent("forward"):
            assert _look_for(WEDGED_S - 270, watchdog, fake) is None
    assert _look_for(1000, watchdog, fake) is None, "nothing is under way"
    with clock.spent("forward"):
        assert _look_for(WEDGED_S + 1, watchdog, fake) is None, "batches of this size take long"
        told = _look_for(300, watchdog, fake)
        assert "no end of a forward for 601 s, where one takes 30 s" in str(told)
    assert watchdog.look() is None


@pytest.mark.parametrize("on", ["self-check", "compiling"])
def test_the_first_of_what_compiles_kernels_may_take_longer(on: SpentOn) -> None:
    fake = _FakeTime()
    clock = Clock(fake)
    watchdog = Watchdog(clock, 1, fake)
    with clock.spent(on):
        assert _look_for(START_S, watchdog, fake) is None
        told = _look_for(1, watchdog, fake)
        assert str(told).endswith(f"{on} for {START_S + 1:.0f} s: the device hangs"), "nothing is typical yet"
    with clock.spent(on):
        fake.now_s += 1
    with clock.spent("loading"):
        assert _look_for(10 * START_S, watchdog, fake) is None, "a target may come over a slow line"


def _look_for(seconds: float, watchdog: Watchdog, fake: _FakeTime) -> str | None:
    """What the last of so many looks says, a second apart."""
    said = None
    for _ in range(int(seconds)):
        fake.now_s += 1
        said = watchdog.look()
    return said


def test_a_process_that_slept_has_not_seen_its_device_hang() -> None:
    fake = _FakeTime()
    clock = Clock(fake)
    watchdog = Watchdog(clock, 1, fake)
    with clock.spent("forward"):
        for _ in range(2):
            fake.now_s += 10 * WEDGED_S
            assert watchdog.look() is None
        assert _look_for(WEDGED_S - 2, watchdog, fake) is None
        assert _look_for(1, watchdog, fake) is not None, "awake it has"


def test_the_whole_group_of_a_lane_dies_with_it() -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print(child.pid, flush=True)\n"
        "from layertap.watchdog import kill_process_group\n"
        "kill_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True
    )
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(int(done.stdout), 0)
            time.sleep(0.05)


def test_the_shard_is_blamed_that_has_waited_longest_for_the_device() -> None:
    fake = _FakeTime()
    clocks = {shard: Clock(fake) for shard in (3, 4, 5)}
    with clocks[3].spent("waiting for the store"):
        fake.now_s += 10
        assert blamed(clocks) is None
        with clocks[5].spent("copying to the host"):
            fake.now_s += 10
            with clocks[4].spent("forward"):
                fake.now_s += 10
                assert blamed(clocks) == 5
    assert blamed({}) is None


def _as_on_a_gpu(**seconds: float) -> None:
    """For this process: a CPU is watched, too, and what hangs is soon told."""
    layertap.lane.can_hang = lambda _: True
    layertap.lane.BEAT_S = 0.2
    for name, value in seconds.items():
        setattr(watchdog, name, value)


def _hang(folder: str, plan_id: str, target: str, what: str) -> None:
    _as_on_a_gpu(WEDGED_S=1.0)
    lane = Lane.open(Store.folder(folder), plan_id, run="run", target=target, name="hung")
    assert lane is not None
    owner = {"tap": Target, "wait_until_copied": Slot}[what]
    setattr(owner, what, lambda *_: signal.pause())
    extract_in_threads(lane)


def _hang_at_first(folder: str, plan_id: str, target: str) -> None:
    _as_on_a_gpu(START_S=1.0)
    Target.self_check = lambda _: signal.pause()  # type: ignore[assignment, method-assign]
    Lane.open(Store.folder(folder), plan_id, run="run", target=target, name="hung")


def test_a_lane_that_hangs_before_its_first_shard_dies(folder_store: Store, tmp_path: Path) -> None:
    target = saved(tiny_llama(), tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(60), tmp_path / "rows"), target))
    assert run.plan is not None
    arguments = (str(tmp_path / "root"), run.plan.plan_id, target)
    lane = multiprocessing.get_context("spawn").Process(target=_hang_at_first, args=arguments)
    lane.start()
    lane.join(90)
    was_alive = lane.is_alive()
    lane.kill()
    assert not was_alive and lane.exitcode == -signal.SIGKILL
    assert Catalog(folder_store).snapshot(run.plan.plan_id).names == {}


@pytest.mark.parametrize(
    ("what", "words"), [("tap", "a forward"), ("wait_until_copied", "a copy to the host")]
)
def test_a_lane_that_hangs_records_why_and_dies(
    folder_store: Store, tmp_path: Path, what: str, words: str
) -> None:
    """And its other shard, that hangs along, is given back."""
    target = saved(tiny_llama(), tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(60), tmp_path / "rows"), target))
    assert run.plan is not None
    arguments = (str(tmp_path / "root"), run.plan.plan_id, target, what)
    lane = multiprocessing.get_context("spawn").Process(target=_hang, args=arguments)
    lane.start()
    lane.join(90)
    assert lane.exitcode == -signal.SIGKILL
    names = Catalog(folder_store).snapshot(run.plan.plan_id).names
    assert sorted(names) == [0, 1], "two are in flight"
    [hung] = [shard for shard in names if "fail-1.hung" in names[shard]]
    assert sorted(names[1 - hung]) == ["claim-1", "release-1"]
    failure = Catalog(folder_store).last_failure(run.plan.plan_id, hung, shard_state(names[hung]))
    assert f"no end of {words} for" in failure["error"]


def _is_slow_on_a_cpu(folder: str, plan_id: str, target: str, inside: str) -> None:
    layertap.lane.BEAT_S = 0.2
    watchdog.WEDGED_S = 0.4
    _be_slow_at_first(folder, plan_id, target, inside)


def _is_slow_on_a_gpu(folder: str, plan_id: str, target: str, inside: str) -> None:
    _as_on_a_gpu(WEDGED_S=4.0)
    _be_slow_at_first(folder, plan_id, target, inside)


def _be_slow_at_first(folder: str, plan_id: str, target: str, inside: str) -> None:
    lane = Lane.open(Store.folder(folder), plan_id, run="run", target=target, name="slept")
    assert lane is not None
    tap = Target.tap

    def slow(self: Target, *arguments: Any) -> Any:
        if not Path(inside).exists():
            Path(inside).touch()
            time.sleep(1)
        return tap(self, *arguments)

    Target.tap = slow  # type: ignore[method-assign]
    with lane:
        extract_in_threads(lane)


def test_a_cpu_is_slow_and_does_not_hang(folder_store: Store, tmp_path: Path) -> None:
    target = saved(tiny_llama(), tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(60), tmp_path / "rows"), target))
    assert run.plan is not None
    arguments = (str(tmp_path / "root"), run.plan.plan_id, target, str(tmp_path / "inside"))
    lane = multiprocessing.get_context("spawn").Process(target=_is_slow_on_a_cpu, args=arguments)
    lane.start()
    lane.join(90)
    assert lane.exitcode == 0
    run.publish().check(0.0)


def test_a_lane_that_was_stopped_in_a_forward_goes_on(folder_store: Store, tmp_path: Path) -> None:
    """As by a debugger, or with its virtual machine."""
    target = saved(tiny_llama(), tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(60), tmp_path / "rows"), target))
    assert run.plan is not None
    inside = tmp_path / "inside"
    arguments = (str(tmp_path / "root"), run.plan.plan_id, target, str(inside))
    lane = multiprocessing.get_context("spawn").Process(target=_is_slow_on_a_gpu, args=arguments)
    lane.start()
    while lane.is_alive() and not inside.exists():
        time.sleep(0.05)
    assert lane.pid is not None
    os.kill(lane.pid, signal.SIGSTOP)
    time.sleep(6)
    os.kill(lane.pid, signal.SIGCONT)
    lane.join(90)
    assert lane.exitcode == 0
    run.publish().check(0.0)
