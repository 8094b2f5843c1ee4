"""A lane has its device alone."""

import multiprocessing
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


def test_a_gpu_is_held_by_one_process_and_let_go_when_it_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    properties = SimpleNamespace(uuid="test-uuid", name="Fake")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu = torch.device("cuda")
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hold() -> None:
        with own_device(gpu):
            ready.set()
            context.Event().wait()

    holder = context.Process(target=hold)
    holder.start()
    assert ready.wait(10)
    with pytest.raises(DeviceError, match="another process holds Fake"), own_device(gpu):
        pass
    holder.kill()
    holder.join()
    with own_device(gpu):
        pass
