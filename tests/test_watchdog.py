"""A lane whose device hangs ends itself, and says why."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import layertap.lane
from layertap import watchdog
from layertap.catalog import Catalog
from layertap.coordinator import Run
from layertap.lane import Lane
from layertap.lane_work import extract_in_threads
from layertap.progress import Clock
from layertap.store import Store
from layertap.target import Target
from layertap.watchdog import WEDGED_S, wedged
from tests.models import saved, tiny_llama
from tests.runs import save_rows, settings_for, some_rows


class _FakeTime:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_pass_is_hung_after_five_minutes_or_twenty_times_the_mean() -> None:
    fake = _FakeTime()
    clock = Clock(fake)
    for _ in range(4):
        with clock.spent("forward"):
            fake.now_s += 30
    fake.now_s += 10_000
    assert wedged(clock) is None, "nothing is under way"
    with clock.spent("forward"):
        fake.now_s += WEDGED_S + 1
        assert wedged(clock) is None, "batches of this size take long"
        fake.now_s += 300
        assert "no end of a forward for 601 s, where one takes 30 s" in str(wedged(clock))
    assert wedged(clock) is None


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


def _hang(folder: str, plan_id: str, target: str) -> None:
    layertap.lane.BEAT_S = 0.2
    watchdog.WEDGED_S = 1.0
    lane = Lane.open(Store.folder(folder), plan_id, run="run", target=target, name="hung")
    assert lane is not None
    Target.tap = lambda *_: signal.pause()  # type: ignore[assignment,method-assign]
    extract_in_threads(lane)


def test_a_lane_that_hangs_records_why_and_dies(folder_store: Store, tmp_path: Path) -> None:
    target = saved(tiny_llama(), tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(5), tmp_path / "rows"), target))
    assert run.plan is not None
    arguments = (str(tmp_path / "root"), run.plan.plan_id, target)
    lane = multiprocessing.get_context("spawn").Process(target=_hang, args=arguments)
    lane.start()
    lane.join(90)
    assert lane.exitcode == -signal.SIGKILL
    failure = Catalog(folder_store).last_failure(run.plan.plan_id, 0)
    assert "no end of a forward for" in failure["error"]
