"""What lanes tell of themselves is in the store, bounded, and drawn."""

import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from layertap import lane as lane_module
from layertap import lane_log
from layertap.cli import main
from layertap.coordinator import Run
from layertap.gpu_meter import GpuMeter
from layertap.lane_log import LaneLog
from layertap.lane_record import LaneRecord, bottleneck_of, lane_records
from layertap.plot import speed_png, tokens_per_s
from layertap.progress import Clock
from layertap.records import now, to_json
from layertap.store import Store
from layertap.target import Target
from tests.models import saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows

CPU = torch.device("cpu")


def record(**changes: Any) -> LaneRecord:
    values: dict[str, Any] = {
        "lane": "lane-0",
        "run": "run",
        "host": "host",
        "device": "NVIDIA H200 (GPU-0)",
        "opened_at": "2026-01-01T00:00:00.000+00:00",
        "updated_at": "2026-01-01T00:01:40.000+00:00",
        "seconds": {"loading": 10.0, "forward": 85.0, "other": 5.0},
        "num_tokens": 900,
        "samples": [[10.0, 0, 5], [20.0, 100, 7], [40.0, 900, 6]],
        "gpu": {"note": "no NVML: the lane runs on the CPU"},
        "environment": {},
    }
    return LaneRecord(**{**values, **changes})


def test_a_lane_tells_all_of_itself_in_the_store(folder_store: Store, tmp_path: Path) -> None:
    target = saved(tiny_llama(), tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(20), tmp_path / "rows"), target))
    assert run.plan is not None
    run_lane(folder_store, run.plan.plan_id, target, "lane-0")
    (told,) = lane_records(folder_store, run.plan.plan_id)
    assert (told.lane, told.num_tokens) == ("lane-0", run.plan.num_tokens)
    assert told.seconds["loading"] > 0 and told.seconds["forward"] > 0
    assert told.samples[-1][:2] == [pytest.approx(told.elapsed_s), told.num_tokens]
    assert told.peak_resident_bytes > 50_000_000
    shown = CliRunner().invoke(main, ["status", folder_store.uri, "--plan", run.plan.plan_id])
    assert shown.exit_code == 0, shown.output
    assert "bound by" in shown.output and "NVML" in shown.output
    in_short = CliRunner().invoke(main, ["status", folder_store.uri]).output
    assert f"plan {run.plan.plan_id}, lanes of its last run: {told.bottleneck}" in in_short
    assert told.environment["compiled"] is False and "not compiled, attention sdpa" in told.computed_by


def test_a_record_from_before_kernels_were_kept_is_read(folder_store: Store) -> None:
    older = asdict(record())
    del older["environment"]
    folder_store.put("plans/plan/lanes/lane-0.json", to_json(older))
    (told,) = lane_records(folder_store, "plan")
    assert told == record() and told.computed_by == "not recorded"


def test_a_lane_opens_when_its_seconds_begin_to_count(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = saved(tiny_llama(), tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(2), tmp_path / "rows"), target))
    assert run.plan is not None
    loading_at = []

    def load(*args: Any, **kwargs: Any) -> Target:
        loading_at.append(now("milliseconds"))
        time.sleep(0.01)
        return Target.load(*args, **kwargs)

    monkeypatch.setattr(lane_module, "Target", SimpleNamespace(load=load))
    run_lane(folder_store, run.plan.plan_id, target)
    (told,) = lane_records(folder_store, run.plan.plan_id)
    assert told.opened_at <= loading_at[0] < told.updated_at


@pytest.mark.parametrize("spike", [0, 7, 28, 37])
def test_a_long_lane_keeps_few_samples_from_its_whole_life(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, spike: int
) -> None:
    monkeypatch.setattr(lane_log, "MAX_SAMPLES", 8)
    log = LaneLog(
        folder_store,
        "plan",
        lane="lane-0",
        run="run",
        device=CPU,
        environment={},
        opened_at=now(),
        clock=Clock(),
    )
    peak = 10**15
    for num_tokens in range(200):
        resident = peak if num_tokens == spike else 1000 + num_tokens
        log._process = Mock(memory_info=lambda rss=resident: Mock(rss=rss))
        told = log.note(num_tokens)
        assert len(told.samples) <= 8
        assert told.peak_resident_bytes == peak or num_tokens < spike
    assert sum(sample[2] == peak for sample in told.samples) == 1
    tokens = [sample[1] for sample in told.samples]
    assert tokens[0] == 0 and tokens[-1] > 150 and len(tokens) >= 4
    assert lane_records(folder_store, "plan") == [told]


def test_where_there_is_no_nvml_it_says_so() -> None:
    meter = GpuMeter(CPU)
    meter.sample()
    assert meter.summary() == {"note": "no NVML: the lane runs on the CPU"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nvml_tells_load_and_memory_of_the_gpu() -> None:
    meter = GpuMeter(torch.device("cuda", 0))
    meter.sample()
    summary = meter.summary()
    assert 0 <= summary["utilisation_percent"] <= 100
    assert 0 < summary["peak_memory_bytes"] <= summary["memory_bytes"]


def test_the_gpu_in_words() -> None:
    gpu = {"utilisation_percent": 97.6, "num_samples": 9, "peak_memory_bytes": 6e10, "memory_bytes": 1.5e11}
    assert record(gpu=gpu).gpu_in_words == "GPU 98 % busy, 60 GB of 150 GB used at most"


def test_a_lane_in_words() -> None:
    text = record().markdown()
    assert text.startswith("**Bound by the GPU: 94 % of the time in the forward pass.**")
    assert "900 tokens, 9 a second" in text and "| 85.0 | forward |" in text
    kernels = {"chunk_rule": "fla.ops"}
    text = record(environment={"compiled": True, "attention": "sdpa", "kernels": kernels}).markdown()
    assert "Computed by: compiled layers, attention sdpa, chunk_rule of fla.ops." in text


def test_lanes_together_are_held_up_by_what_takes_most_of_their_time() -> None:
    waiting = record(seconds={"waiting for the store": 300.0, "forward": 5.0})
    assert record().bottleneck.startswith("bound by the GPU")
    assert bottleneck_of([record(), waiting]).startswith("bound by the store: 76 % of the time")
    assert bottleneck_of([waiting, record(run="a later one")]) == record().bottleneck


def test_rates_are_those_between_samples_and_never_negative() -> None:
    assert tokens_per_s(record()) == [(20.0, 10.0), (40.0, 40.0)]
    assert tokens_per_s(record(samples=[[0.0, 50, 1], [10.0, 20, 1], [10.0, 90, 1]])) == [(10.0, 0.0)]


@pytest.mark.parametrize("num_lanes", [1, 3, 40])
def test_the_picture_is_a_small_png(num_lanes: int, tmp_path: Path) -> None:
    records = [record(lane=f"lane-{k}", samples=record().samples[: 1 + k]) for k in range(num_lanes)]
    (tmp_path / "speed.png").write_bytes(speed_png(records))
    with Image.open(tmp_path / "speed.png") as picture:
        assert picture.format == "PNG" and picture.width > 600
    assert (tmp_path / "speed.png").stat().st_size < 200_000
