"""A lane has its device alone."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layertap.errors import DeviceError
from layertap.host import find_device, own_device


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


def test_a_lock_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    properties = SimpleNamespace(uuid="test-uuid", name="Fake")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (tmp_path / "layertap-gpu-test-uuid.lock").mkdir()
    with pytest.raises(DeviceError, match="layertap-gpu-test-uuid.lock of this GPU can't be opened"):
        own_device(torch.device("cuda")).__enter__()


HOLD = """
import sys, time, tempfile, torch
from types import SimpleNamespace
from layertap.host import own_device

tempfile.tempdir = sys.argv[1]
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="test-uuid", name="Fake")
with own_device(torch.device("cuda")):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_gpu_is_held_by_one_process_and_let_go_when_it_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    properties = SimpleNamespace(uuid="test-uuid", name="Fake")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu = torch.device("cuda")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(DeviceError, match="another process holds Fake"), own_device(gpu):
            pass
        holder.kill()
        holder.wait()
    with own_device(gpu):
        pass
