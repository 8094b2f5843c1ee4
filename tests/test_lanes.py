"""Lanes on one plan: every shard is done once, by whichever comes first."""

import threading
from pathlib import Path

import pytest

from layertap import lane as lane_module
from layertap.coordinator import Run
from layertap.lane import Lane
from layertap.lane_work import extract_in_threads
from layertap.store import Store
from tests.models import saved, tiny_llama
from tests.runs import assert_read_back, save_rows, settings_for, some_rows


@pytest.mark.parametrize(("num_lanes", "num_rows"), [(2, 60), (8, 1003)])
def test_lanes_share_the_shards(
    folder_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_lanes: int,
    num_rows: int,
) -> None:
    monkeypatch.setattr(lane_module, "BEAT_S", 0.2)
    target = saved(tiny_llama(), tmp_path / "target")
    rows = some_rows(num_rows)
    run = Run.prepare(folder_store, settings_for(save_rows(rows, tmp_path / "rows"), target))
    assert run.plan is not None
    plan_id, reports = run.plan.plan_id, {}

    def work(lane: Lane) -> None:
        with lane:
            reports[lane.name] = extract_in_threads(lane)

    # One after the other: transformers changes its classes while it loads, for all threads.
    opened = [
        Lane.open(folder_store, plan_id, run="run", target=target, name=f"lane-{i}") for i in range(num_lanes)
    ]
    threads = [threading.Thread(target=work, args=(lane,)) for lane in filter(None, opened)]
    assert len(threads) == num_lanes
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shards = [outcome.shard for report in reports.values() for outcome in report.committed]
    assert sorted(shards) == list(range(len(run.plan.shards)))
    run.publish().check(0.0)
    assert_read_back(folder_store, rows, tiny_llama())
