"""All shards of a plan as a Parquet file: what a person's table has no room for."""

from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from layertap.background import at_once
from layertap.shard_state import ShardState
from layertap.watch import Watch

COUNTS = ("shard", "claims", "failures", "deaths", "planned_rows", "planned_tokens")
RESULTS = ("rows", "tokens", "bytes", "refused", "splits")
TEXTS = ("state", "lane", "host", "device", "attempt", "started_at", "ended_at", "error")

SCHEMA = pa.schema(
    [(name, pa.int64()) for name in (*COUNTS, *RESULTS)] + [(name, pa.string()) for name in TEXTS]
)
"""Null where a shard has no outcome, or no failure."""


def put_shard_table(watch: Watch) -> str:
    """Write how each shard of a plan stood at a watch's last look, and who did it; returns the path."""
    rows = at_once(lambda k: _row(watch, k), range(len(watch.plan.shards)))
    sink = BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows.values()), SCHEMA), sink)
    path = f"reports/plan-{watch.plan.plan_id}-shards.parquet"
    watch.catalog.store.put(path, sink.getvalue())
    return path


def _row(watch: Watch, shard: int) -> dict[str, Any]:
    status, record, plan_id = watch.statuses[shard], watch.plan.shards[shard], watch.plan.plan_id
    told: dict[str, Any] = {}
    if status.state == ShardState.COMMITTED:
        outcome = watch.catalog.outcome(plan_id, shard)
        told = {
            **outcome.to_dict(),
            "rows": outcome.num_rows,
            "tokens": outcome.num_tokens,
            "bytes": outcome.nbytes,
            "refused": len(outcome.refused),
            "splits": outcome.num_splits,
        }
    elif status.num_failures or status.num_deaths:
        told = watch.catalog.last_failure(plan_id, shard, status)
    return {name: told.get(name) for name in SCHEMA.names} | {
        "shard": shard,
        "state": str(status.state),
        "claims": status.claim,
        "failures": status.num_failures,
        "deaths": status.num_deaths,
        "planned_rows": record.num_rows,
        "planned_tokens": record.num_tokens,
    }
