"""All shards of a plan as a Parquet file: what a person's table has no room for."""

from collections.abc import Collection
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from layertap.background import at_once
from layertap.catalog import Catalog, PlanRecord
from layertap.shard_state import ShardState, shard_state

COUNTS = ("shard", "claims", "failures", "deaths", "planned_rows", "planned_tokens")
RESULTS = ("rows", "tokens", "bytes", "refused", "splits")
TEXTS = ("state", "lane", "host", "device", "attempt", "started_at", "ended_at", "error")

SCHEMA = pa.schema(
    [(name, pa.int64()) for name in (*COUNTS, *RESULTS)] + [(name, pa.string()) for name in TEXTS]
)
"""Null where a shard has no outcome, or no failure."""


def put_shard_table(catalog: Catalog, plan: PlanRecord) -> str:
    """Write how each shard of a plan stands and who did it; returns the file's path."""
    names = catalog.snapshot(plan.plan_id).names
    rows = at_once(lambda k: _row(catalog, plan, k, names.get(k, ())), range(len(plan.shards)))
    sink = BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows.values()), SCHEMA), sink)
    path = f"reports/plan-{plan.plan_id}-shards.parquet"
    catalog.store.put(path, sink.getvalue())
    return path


def _row(catalog: Catalog, plan: PlanRecord, shard: int, names: Collection[str]) -> dict[str, Any]:
    status, record = shard_state(names), plan.shards[shard]
    told: dict[str, Any] = {}
    if status.state == ShardState.COMMITTED:
        outcome = catalog.outcome(plan.plan_id, shard)
        told = {
            **outcome.to_dict(),
            "rows": outcome.num_rows,
            "tokens": outcome.num_tokens,
            "bytes": outcome.nbytes,
            "refused": len(outcome.refused),
            "splits": outcome.num_splits,
        }
    elif status.num_failures or status.num_deaths:
        told = catalog.last_failure(plan.plan_id, shard, names)
    return {name: told.get(name) for name in SCHEMA.names} | {
        "shard": shard,
        "state": str(status.state),
        "claims": status.claim,
        "failures": status.num_failures,
        "deaths": status.num_deaths,
        "planned_rows": record.num_rows,
        "planned_tokens": record.num_tokens,
    }
