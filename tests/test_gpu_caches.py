"""What a host keeps of compiling: by versions and GPU, made by one lane at a time."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from layertap.gpu_caches import FLA_CONFIGS, cache_folder, one_compiles, use_caches

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA Test")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLA_CONFIG_DIR", "FLA_CACHE_MODE"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def test_another_version_or_gpu_has_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = cache_folder(GPU)
    assert mine.is_relative_to(tmp_path) and cache_folder(GPU) == mine
    monkeypatch.setattr("layertap.gpu_caches.metadata.version", lambda name: f"9.9 of {name}")
    other_versions = cache_folder(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA Other")
    assert len({mine, other_versions, cache_folder(GPU)}) == 3


def test_what_the_environment_says_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    use_caches(GPU)
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache_folder(GPU) / "inductor")
    assert os.environ["FLA_CONFIG_DIR"] == str(FLA_CONFIGS) and list(FLA_CONFIGS.glob("*.json"))


def test_one_lane_compiles_and_those_that_came_meanwhile_go_on_together() -> None:
    first_is_in, first_may_leave, all_in = threading.Event(), threading.Event(), threading.Barrier(3)
    order: list[str] = []

    def first() -> None:
        with one_compiles(GPU):
            first_is_in.set()
            first_may_leave.wait(10)
            order.append("first")

    def later() -> None:
        with one_compiles(GPU):
            order.append("later")
            all_in.wait(10)  # both are inside at once

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert first_is_in.wait(10)
    threads += [threading.Thread(target=later) for _ in range(2)]
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.2)
    first_may_leave.set()
    all_in.wait(10)
    for thread in threads:
        thread.join(10)
    assert order == ["first", "later", "later"]
