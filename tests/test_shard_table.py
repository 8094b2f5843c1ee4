"""All shards of a plan, whatever became of them, in one Parquet file."""

from io import BytesIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from layertap.catalog import Catalog, Snapshot
from layertap.coordinator import Run
from layertap.store import Store
from tests.models import saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows


@pytest.fixture
def target(tmp_path: Path) -> str:
    return saved(tiny_llama(), tmp_path / "target")


@pytest.fixture
def run(folder_store: Store, tmp_path: Path, target: str) -> Run:
    """A run whose shard 0 has failed for good, on two lanes."""
    settings = settings_for(save_rows(some_rows(80), tmp_path / "rows"), target, max_refused_share=1.0)
    run = Run.prepare(folder_store, settings)
    assert run.plan is not None
    for number, lane in enumerate(("a", "b"), start=1):
        claim = run.catalog.claim(run.plan.plan_id, 0, number, lane=lane, details={})
        assert claim is not None
        run.catalog.fail(claim, {"error": f"ValueError: on {lane}", "lane": lane, "host": "h1"})
    return run


def test_every_shard_has_a_row_with_who_did_it_or_why_it_failed(
    run: Run, folder_store: Store, target: str
) -> None:
    assert run.plan is not None
    watch = run.watch()
    run_lane(folder_store, run.plan.plan_id, target, "c")
    watch.poll()
    report = run.publish(watch)
    assert report.shard_table in report.markdown()
    first, *others = pq.read_table(BytesIO(folder_store.get(report.shard_table))).to_pylist()
    assert len(others) == len(run.plan.shards) - 1 > 1
    assert [row["shard"] for row in others] == list(range(1, len(run.plan.shards)))
    assert (first["state"], first["failures"], first["lane"], first["host"]) == ("failed", 2, "b", "h1")
    assert (first["error"], first["rows"]) == ("ValueError: on b", None)
    assert {(row["state"], row["lane"], row["error"]) for row in others} == {("committed", "c", None)}
    assert all(row["rows"] == row["planned_rows"] and row["bytes"] > 0 and row["ended_at"] for row in others)
    assert sum(row["tokens"] for row in others) + first["planned_tokens"] == run.plan.num_tokens


def test_a_look_lists_the_states_once_however_many_shards_have_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: list[str] = []
    honest = Catalog.snapshot

    def counted(self: Catalog, plan_id: str) -> Snapshot:
        lists.append(plan_id)
        return honest(self, plan_id)

    watch = run.watch()
    monkeypatch.setattr(Catalog, "snapshot", counted)
    (failed,) = [row for row in watch.poll().shards if row["state"] == "failed"]
    assert failed["error"] == "ValueError: on b" and watch.failures() == {0: "ValueError: on b"}
    assert len(lists) == 1
