"""A lane has its device alone."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from layertap.errors import DeviceError
from layertap.host import LOCKS, find_device, own_device

GPU = torch.device("cuda")


def test_two_visible_gpus_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="sees 2 GPUs.*layertap workers"):
        find_device()


def test_a_gpu_that_should_be_there_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is 'GPU-1234', but torch .* sees no GPU"):
        find_device()


def test_without_a_gpu_the_lane_runs_on_the_cpu() -> None:
    assert find_device() == torch.device("cpu")


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The lock of a GPU that isn't there."""
    properties = SimpleNamespace(uuid=f"test-{uuid.uuid4()}", name="Fake")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    path = LOCKS / f"layertap-gpu-{properties.uuid}.lock"
    yield path
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


def test_a_lock_that_cannot_be_opened_is_named(lock: Path) -> None:
    lock.mkdir()
    with pytest.raises(DeviceError, match=f"{lock.name} of this GPU can't be opened"):
        own_device(GPU).__enter__()


HOLD = """
import os, sys, time, torch
from types import SimpleNamespace
from layertap.host import own_device

os.umask(0o077)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=sys.argv[1], name="Fake")
with own_device(torch.device("cuda")):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_gpu_is_held_by_one_process_whatever_its_user_and_tmpdir_and_let_go_when_it_dies(
    lock: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLD, lock.stem.removeprefix("layertap-gpu-")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert lock.stat().st_mode & 0o777 == 0o644
        with pytest.raises(DeviceError, match="another process holds Fake"), own_device(GPU):
            pass
        holder.kill()
        holder.wait()
    with own_device(GPU):
        pass
