"""A lane against a store at a tenth of the rate at which it could write: its memory has to stay flat."""

import json
import multiprocessing
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from layertap.coordinator import Run
from layertap.object_server import ObjectServer
from layertap.plan import PlanSettings
from layertap.staging import slot_nbytes
from layertap.store import Store
from tests.models import saved, tiny_llama
from tests.proxy import Proxy
from tests.runs import save_rows, settings_for, some_rows

NUM_ROWS = 300
LONGEST = 900
MAX_GROWTH = 0.1
"""Of what is stored: memory by which the last fifth of a slow run may lie above the second."""


def slow_store(folder: Path, server: ObjectServer, proxy: Proxy) -> dict[str, Any]:
    """Measure a lane first without a limit, then with a tenth of the rate that came out; what it took."""
    settings = settings_for(
        save_rows(some_rows(NUM_ROWS, longest=LONGEST), folder / "slow-rows"),
        saved(tiny_llama(), folder / "slow-target"),
        max_length=LONGEST + 2,
        plan=PlanSettings(max_batch_tokens=4096, shard_tokens=20_000),
    )
    os.environ |= {**server.environment(), "AWS_ENDPOINT_URL_S3": proxy.endpoint_url}
    free = _one_lane(settings, server, "free")
    proxy.faults.bytes_per_s = free["bytes"] / free["seconds"] / 10
    slow = _one_lane(settings, server, "slow")
    fifths = [_peak(slow["resident"], k) for k in range(5)]
    line = {
        "stored MB": round(slow["bytes"] / 1e6),
        "MB/s without a limit": round(free["bytes"] / free["seconds"] / 1e6, 1),
        "MB/s of the slow store": round(slow["bytes"] / slow["seconds"] / 1e6, 2),
        "slots MB": round(slow["slots"] / 1e6),
        "memory MB without a limit, at most": round(max(free["resident"]) / 1e6),
        "memory MB of the slow run, at most in each fifth": [round(peak / 1e6) for peak in fifths],
        "share of time waiting for the store": round(slow["waiting"], 2),
    }
    assert fifths[-1] - fifths[1] < MAX_GROWTH * slow["bytes"], line
    return line


def _peak(resident: list[int], fifth: int) -> int:
    """The largest of one fifth of the samples, in bytes."""
    step = len(resident) // 5
    return max(resident[fifth * step : (fifth + 1) * step])


def _one_lane(settings: Any, server: ObjectServer, root: str) -> dict[str, Any]:
    from tests.soak import BUCKET, lane_process

    store = Store.s3(server.settings(BUCKET, prefix=root), server.session())
    run = Run.prepare(store, settings)
    assert run.plan is not None
    arguments = (f"s3://{BUCKET}/{root}", run.plan.plan_id, run.run_id, settings.target, "lane-0")
    lane = multiprocessing.get_context("spawn").Process(target=lane_process, args=arguments)
    lane.start()
    process, resident = psutil.Process(lane.pid), []
    while lane.is_alive():
        if store.names(f"plans/{run.plan.plan_id}/state"):  # the target is loaded
            resident.append(process.memory_info().rss)
        time.sleep(0.2)
    assert lane.exitcode == 0
    outcomes = [run.catalog.outcome(run.plan.plan_id, k) for k in range(len(run.plan.shards))]
    record = json.loads(store.get(f"plans/{run.plan.plan_id}/lanes/lane-0.json"))
    seconds = record["seconds"]
    begin, end = min(o.started_at for o in outcomes), max(o.ended_at for o in outcomes)
    spec, info, max_batch_bytes = run.preview.spec, run.preview.info, run.plan.max_batch_bytes
    num_slots = info.num_slots(spec, max_batch_bytes)
    return {
        "bytes": sum(outcome.nbytes for outcome in outcomes),
        "seconds": max(1.0, (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()),
        "resident": resident,
        "waiting": seconds["waiting for the store"] / sum(seconds.values()),
        "slots": num_slots * slot_nbytes(max_batch_bytes, spec=spec, hidden_size=info.hidden_size),
    }
