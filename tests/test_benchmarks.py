"""Benchmarks end loudly where what they measure is wrong, and count what they say they count."""

import argparse
import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from benchmarks import gpu_engine, steady_run
from benchmarks.gpu_table import ratios
from benchmarks.steady_run import SteadyRun
from benchmarks.whole_system import rate, timestamp
from layertap.extract import Extractor
from layertap.lane_record import LaneRecord
from layertap.plan import Estimate
from layertap.progress import Clock
from layertap.records import ShardRows
from layertap.spec import ExtractionSpec
from layertap.store import Store
from layertap.target import Target
from tests.models import tiny_llama


def test_the_engine_benchmark_fails_with_a_shard_that_is_not_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ExtractionSpec(target_identity="folder:0", layer_ids=(0, 2), dtype="float32", max_length=64)
    target = Target.from_backbone(tiny_llama(), spec=spec)
    shard = ShardRows.of(np.zeros((1, 16), np.uint8), np.zeros(1, np.int32), [np.arange(9, dtype=np.int32)])
    clock = Clock()

    def changed(*args: object) -> bool:
        time.sleep(0.02)  # the shard's own thread has gone on by then
        return False

    monkeypatch.setattr(steady_run, "WARM_S", 0.0)
    monkeypatch.setattr(steady_run, "is_as_written", changed)
    with (
        Extractor(
            target, Store.folder(tmp_path), max_batch_bytes=1 << 20, num_slots=2, clock=clock
        ) as extractor,
        pytest.raises(SystemExit, match="isn't what was written"),
    ):
        SteadyRun(extractor, [shard], tmp_path, clock).measure(0.1)


def test_gpus_do_not_wait_for_ever_for_one_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "BARRIER_S", 0.1)
    options = argparse.Namespace(rank=1, of=2, seconds=0.0, barrier=tmp_path)
    with pytest.raises(SystemExit, match="GPU 0 of 2 isn't ready"):
        gpu_engine.alone_then_together(options, cast(Target, None), [], cast(Estimate, None))


def test_kernels_beside_one_another_count_once_and_gaps_do_not() -> None:
    assert gpu_engine.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == (4, 6)


@pytest.mark.parametrize(("num_samples", "tokens_per_s"), [(30, 1200.0), (10, 9 * 12_000 / 185)])
def test_a_lane_that_ended_in_the_window_counts_to_its_end(num_samples: int, tokens_per_s: float) -> None:
    opened_at = "2026-01-01T00:00:00.000+00:00"
    record = LaneRecord(
        lane="lane-0",
        run="run",
        host="host",
        device="GPU",
        opened_at=opened_at,
        updated_at=opened_at,
        seconds={},
        num_tokens=1,
        samples=[[10.0 * k, 12_000.0 * k, 1] for k in range(1, num_samples + 1)],
        gpu={},
        environment={},
    )
    start = timestamp(opened_at) + 10.0
    assert rate(record, start, start + 185.0)["tokens_per_s"] == pytest.approx(tokens_per_s)


def test_the_table_sees_the_engine_against_each_forward_pass_and_several_against_one() -> None:
    rates = {"eager_alone": 100.0, "eager_1x264": 20.0, "eager_31x264": 110.0, "compiled_alone": 150.0}
    engine = {"tokens_per_s": 140.0, "outside_forward_share": 0.01, "elapsed_s": 90.0}
    found = {
        **{name: {"tokens_per_s": rate} for name, rate in rates.items()},
        "alone": engine,
        "engine": engine | {"tokens_per_s": 120.0},
        "flops_per_token": 2e12,
        "share_of_ceiling": 0.7,
    }
    several = {"gpus": [found, {}], "alone": [136.0, 144.0], "together": [120.0, 132.0], "ratio": 1.8}
    table = [(one.layertap, one.against, one.ratio, one.is_met) for one in ratios(several)]
    assert [row[:2] for row in table[:5]] == [(252, 140), (140, 100), (140, 150), (140, 20), (150, 100)]
    assert [row[3] for row in table] == [False, True, None, None, None, None, True]
    assert table[5] == (280, pytest.approx(400), 0.7, None) and table[6] == (0.9, 90, 0.01, True)
    del found["compiled_alone"]
    assert len(ratios(found)) == 4
