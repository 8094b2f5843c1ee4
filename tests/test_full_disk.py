"""A root on a disk that is really full: what the lane says, what is seen, and how the run goes on."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load

import layertap.lane
from layertap import HiddenStates
from layertap.coordinator import Run
from layertap.errors import StoreRefusedError
from layertap.garbage import find_garbage
from layertap.store import Store
from layertap.verify import verify_root
from tests.models import saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows

NUM_ROWS = 60
LEFT_BYTES = 1_600_000
"""Room for the target's files, and for one shard and a half."""

ON_A_DISK_OF_ITS_OWN = 'mount -t tmpfs -o size=16m none "$1" && exec "$2" -m tests.test_full_disk "$@"'


def fill_and_make_room(disk: str, _python: str, rows: str, target: str) -> None:
    """A lane fills the disk, and another goes on when there is room."""
    layertap.lane.BEAT_S = 0.2
    store, ballast = Store.folder(Path(disk) / "root"), Path(disk) / "ballast"
    run = Run.prepare(store, settings_for(rows, target))
    assert run.plan is not None
    plan_id, num_shards = run.plan.plan_id, len(run.plan.shards)
    ballast.write_bytes(bytes(psutil.disk_usage(disk).free - LEFT_BYTES))

    with pytest.raises(StoreRefusedError, match="^can't .*No space left on device"):
        run_lane(store, plan_id, target, "first")
    stored = run.catalog.committed(plan_id)
    assert 0 < len(stored) < num_shards
    for info in store.list("plans"):
        if info.path.endswith(".safetensors"):
            load(store.get(info.path))  # which refuses a file that is cut short
    verify_root(store, num_rows=None).check()

    ballast.unlink()
    again = run_lane(store, plan_id, target, "next").committed
    assert sorted(stored + [outcome.shard for outcome in again]) == list(range(num_shards))
    run.publish().check(0.0)
    assert [row["row"] for row in HiddenStates(store)] == list(range(NUM_ROWS))
    find_garbage(store, older_than=timedelta(0)).delete()
    assert not store.temporary_files()
    verify_root(store, num_rows=None).check()


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(tmp_path: Path) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("this system lets nobody mount a disk of his own")
    disk = tmp_path / "disk"
    disk.mkdir()
    rows = save_rows(some_rows(NUM_ROWS), tmp_path / "rows")
    target = saved(tiny_llama(), tmp_path / "target")
    command = [*namespace, "sh", "-c", ON_A_DISK_OF_ITS_OWN, "sh", str(disk), sys.executable, rows, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    fill_and_make_room(*sys.argv[1:])
