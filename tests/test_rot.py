"""Records that lost their content, as by a loss of power, cost what they said and nothing else."""

from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from layertap import HiddenStates, fidelity
from layertap.catalog import Catalog, PlanRecord
from layertap.cli import main
from layertap.errors import IntegrityError
from layertap.failures import read_failures
from layertap.fidelity import Fidelity
from layertap.fidelity import record as record_check
from layertap.garbage import find_garbage, old_versions
from layertap.lane_record import lane_path, lane_records
from layertap.run_records import RunRecord, RunRecords
from layertap.shard_state import ShardState
from layertap.store import Store
from layertap.verify import verify_root
from layertap.versions import Versions
from layertap.watch import Watch
from tests.stored import (
    claimed,
    dataset_of,
    extract,
    new_catalog,
    plan_for,
    planned,
    publish,
    some_rows,
)

pytestmark = pytest.mark.parametrize("rotten", [b"", b'{"lane":', b"\xff\xfe", b"{}"])

CHECK = Fidelity(
    version=1,
    endpoint="http://127.0.0.1:8000",
    model="tiny",
    api="vllm",
    num_rows=2,
    num_tokens=30,
    agreement=1.0,
    mean_abs_logprob_difference=0.0,
    min_agreement=0.97,
    created_at="2026-01-01T00:00:00+00:00",
)


@pytest.fixture
def catalog(folder_store: Store) -> Catalog:
    return new_catalog(folder_store)


@pytest.fixture
def plan(catalog: Catalog, tmp_path: Path) -> PlanRecord:
    return plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog)


def test_of_a_plan_whose_record_is_damaged_what_is_committed_counts_and_the_rest_is_planned_anew(
    catalog: Catalog, tmp_path: Path, rotten: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store, data = catalog.store, dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(*data, catalog)
    extract(catalog, plan, [0, 1])
    for number, lane in enumerate(("a", "b"), start=1):
        catalog.fail(claimed(catalog, plan, 2, number, lane=lane), {"error": "ValueError: x", "lane": lane})
    path = f"plans/{plan.plan_id}/plan.json"
    store.put(path, rotten)

    left = sum(shard.num_rows for shard in plan.shards[2:])
    assert len(catalog.settled().keys) == plan.num_rows - left
    assert f"what it has committed counts, the rest is planned anew: {path} is damaged" in caplog.text
    assert read_failures(catalog) == [], "nobody will try them again under this plan"
    shown = CliRunner().invoke(main, ["status", store.uri])
    assert shown.exit_code == 0 and "of another schema or damaged" in " ".join(shown.output.split())
    again = planned(*data, catalog)
    assert (again.num_rows, again.plan_id == plan.plan_id) == (left, False)
    extract(catalog, again)
    assert publish(catalog, *data).complete
    assert len(list(HiddenStates(store))) == 20
    assert not find_garbage(store, older_than=timedelta(0)).reasons
    (finding,) = verify_root(store, num_rows=None).findings
    assert finding.where == path
    assert "counts as before" in finding.way_out and "void" not in finding.way_out


def test_of_a_lane_whose_claim_is_damaged_nothing_is_told_and_the_others_are_seen(
    catalog: Catalog, plan: PlanRecord, rotten: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    claimed(catalog, plan, 0, lane="rotten")
    claimed(catalog, plan, 1, lane="sound")
    path = f"plans/{plan.plan_id}/state/00000.claim-1"
    catalog.store.put(path, rotten)
    watch = Watch(catalog, plan)
    for _ in range(2):
        progress = watch.poll()
    assert progress.shards_by_state[ShardState.CLAIMED] == 2
    assert (progress.lanes, progress.silent_lanes) == ({"sound": 1}, frozenset())
    assert caplog.text.count(f"{path} is damaged") == 1, "named, and not at every look"

    catalog.release_lanes(plan.plan_id, ["rotten", "sound"])
    states = catalog.states(plan.plan_id)
    assert (states[0], states[1]) == (ShardState.CLAIMED, ShardState.WAITING)
    assert catalog.claim(plan.plan_id, 0, 2, lane="next", details={}), "it may be taken over"
    assert [failure.shard for failure in read_failures(catalog)] == [0]


def test_a_failure_whose_record_is_damaged_is_a_failure_still(
    catalog: Catalog, plan: PlanRecord, rotten: bytes
) -> None:
    for number, lane in enumerate(("a", "b"), start=1):
        catalog.fail(claimed(catalog, plan, 0, number, lane=lane), {"error": "ValueError: x", "lane": lane})
        catalog.store.put(f"plans/{plan.plan_id}/state/00000.fail-{number}.{lane}", rotten)
    watch = Watch(catalog, plan)
    watch.poll()
    says = f"its record is damaged: plans/{plan.plan_id}/state/00000.fail-2.b"
    assert watch.failures() == {0: says}
    assert [failure.error for failure in read_failures(catalog)] == [says]


def test_what_a_lane_told_may_be_lost(catalog: Catalog, plan: PlanRecord, rotten: bytes) -> None:
    catalog.store.put(lane_path(plan.plan_id, "lane-0"), rotten)
    assert lane_records(catalog.store, plan.plan_id) == []


def test_the_other_runs_of_a_root_are_remembered(catalog: Catalog, rotten: bytes) -> None:
    records = RunRecords(catalog.store)
    for run_id in ("a", "b"):
        told = {"plan_id": None, "started_at": f"2026-{run_id}", "started_by": "", "request": {"of": run_id}}
        records.put(RunRecord(run_id=run_id, **told))  # type: ignore[arg-type]
    catalog.store.put("runs/b.json", rotten)
    assert records.latest().request == {"of": "a"}


def test_of_checks_of_served_fidelity_the_newest_that_can_be_read_is_shown(
    catalog: Catalog, plan: PlanRecord, tmp_path: Path, rotten: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(catalog, plan)
    publish(catalog, *dataset_of(some_rows(20), tmp_path / "rows.parquet"))
    store = catalog.store
    assert record_check(store, CHECK) == "versions/1.served-1.json"
    for number in (2, 3):
        store.put(f"versions/1.served-{number}.json", rotten)
    shown = CliRunner().invoke(main, ["status", store.uri])
    assert shown.exit_code == 0, shown.output
    assert f"version 1, served fidelity: {CHECK}\n" in shown.output

    get = Store.get

    def pruned_before(store: Store, path: str) -> bytes:
        if fidelity.RECORD.fullmatch(path):
            store.delete([path])
        return get(store, path)

    monkeypatch.setattr(Store, "get", pruned_before)
    assert fidelity.latest(store, 1) is None


def test_a_version_whose_record_is_damaged_is_published_anew_as_verify_says(
    catalog: Catalog, tmp_path: Path, rotten: bytes
) -> None:
    store, versions = catalog.store, Versions(catalog.store)
    few, all_rows = (dataset_of(some_rows(n), tmp_path / f"{n}.parquet") for n in (10, 20))
    for number, (dataset, scan) in enumerate((few, all_rows)):
        extract(catalog, plan_for(dataset, scan, catalog))
        publish(catalog, dataset, scan, parent=number or None)
    table = versions.get(2).rows["path"]
    store.put("versions/2.json", rotten)
    assert len(HiddenStates(store)) == 10, "readers get the newest that can be read"
    (finding,) = verify_root(store).findings
    assert (finding.where, finding.way_out.partition(":")[0]) == ("versions/2.json", "start the run again")
    with pytest.raises(IntegrityError, match=r"versions/2\.json is damaged.*start the run again"):
        find_garbage(store, older_than=timedelta(0))
    assert table not in old_versions(store, num_kept=1).reasons, "a copy of the record may be put back"

    assert publish(catalog, *all_rows, parent=versions.newest_number()).number == 3
    assert len(HiddenStates(store)) == 20
    old = old_versions(store, num_kept=1)
    assert {"versions/2.json", "versions/1.json"} <= old.reasons.keys()
    old.delete()
    assert not find_garbage(store, older_than=timedelta(0)).reasons
    verify_root(store).check()
