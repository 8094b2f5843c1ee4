"""What the soak asserts of its runs would be noticed if it weren't so."""

from datetime import datetime, timedelta
from pathlib import Path

from layertap.catalog import Claim
from layertap.records import now
from layertap.store import Store
from tests.soak import claims_of_ended_shards, rows_of_outcomes
from tests.stored import dataset_of, extract, new_catalog, plan_for, some_rows, write_attempt


def test_a_claim_of_a_shard_whose_outcome_stood_is_named(store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(store)
    plan_id = plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog).plan_id

    def claimed(number: int, at: str) -> Claim:
        claim = catalog.claim(plan_id, 0, number, lane="lane-0", details={"claimed_at": at})
        assert claim is not None
        return claim

    claimed(1, now())
    second = claimed(2, now())
    catalog.commit(second, write_attempt(catalog, second))
    assert not claims_of_ended_shards(store)
    claimed(3, (datetime.fromisoformat(now()) + timedelta(minutes=1)).isoformat())
    assert claims_of_ended_shards(store) == [f"plans/{plan_id}/state/00000.claim-3"]


def test_rows_that_a_second_plan_computes_again_are_counted_twice(store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plans = [plan_for(dataset, scan, catalog, shard_tokens=shard_tokens) for shard_tokens in (300, 200)]
    extract(catalog, plans[0], refused=[catalog.shard_rows(plans[0].plan_id, 0).keys[0].tobytes()])
    assert rows_of_outcomes(store) == 20
    extract(catalog, plans[1], [0])
    assert rows_of_outcomes(store) == 20 + plans[1].shards[0].num_rows
