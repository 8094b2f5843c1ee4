"""A lane whose store doesn't answer: it beats on after one lost request, and ends soon when it has to."""

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import layertap.lane
from layertap import s3
from layertap.coordinator import Run
from layertap.object_server import ObjectServer, ServerPorts
from layertap.plan import PlanSettings
from layertap.shard_state import ShardState
from layertap.store import Store
from layertap.watcher import Watcher
from tests.conftest import BUCKET
from tests.models import saved, tiny_llama
from tests.proxy import Proxy
from tests.runs import run_lane, save_rows, settings_for, some_rows


def test_a_claim_stays_fresh_though_a_beat_is_never_answered(
    object_server: ObjectServer, s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layertap.lane, "BEAT_S", 1.0)
    monkeypatch.setattr(s3, "ANSWER_S", 1)
    settings = settings_for(save_rows(some_rows(60), tmp_path / "rows"), saved(tiny_llama(), tmp_path / "t"))
    run = Run.prepare(s3_store, settings)
    assert run.plan is not None
    plan_id, seen = run.plan.plan_id, set[str | None]()
    with Proxy(object_server.ports.s3).running() as proxy:
        assert isinstance(s3_store._root, s3.Bucket)
        there = dataclasses.replace(s3_store._root.settings, endpoint_url=proxy.endpoint_url)
        store = Store.s3(there, object_server.session())
        lane = layertap.lane.Lane.open(store, plan_id, run="run", target=settings.target, name="lane-0")
        assert lane is not None
        with lane:
            assert lane.claim() is not None
            watcher = Watcher(run.catalog, plan_id, beat_s=1.0)
            proxy.faults.unanswered = re.compile("PUT .*claim-1")
            assert proxy.holds_one.wait(60)
            while len(seen) < 4:
                assert watcher.poll()[0].state == ShardState.CLAIMED
                seen.add(run.catalog.snapshot(plan_id).claims[0][1].e_tag)
                time.sleep(0.1)
            proxy.ended.set()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ObjectServer]:
    """A server that a test may stop, or freeze."""
    server = ObjectServer.start(tmp_path / "server", ports=ServerPorts.free(), buckets=[BUCKET])
    yield server
    if ObjectServer.running(server.folder):
        os.killpg(server.pid, signal.SIGCONT)
        server.stop()


def _stop(server: ObjectServer) -> None:
    server.stop()


def _freeze(server: ObjectServer) -> None:
    os.killpg(server.pid, signal.SIGSTOP)


def _work(uri: str, plan_id: str, target: str) -> None:
    """A lane as its flow runs it, in this process's main thread; all that it waits for is shorter."""
    s3.ANSWER_S, layertap.lane.BEAT_S = 1, 0.2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    run_lane(Store.open(uri), plan_id, target)


@pytest.mark.parametrize("fail", [_stop, _freeze])
def test_a_lane_that_is_told_to_end_does_so_whatever_its_store_does(
    own_server: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[ObjectServer], None],
) -> None:
    """One of its uploads hangs, and all other requests fail: their patience is minutes."""
    rows, plan = some_rows(160, longest=250), PlanSettings(max_batch_tokens=8192, shard_tokens=8192)
    target = saved(tiny_llama(), tmp_path / "target")
    settings = settings_for(save_rows(rows, tmp_path / "rows"), target, max_length=256, plan=plan)
    with Proxy(own_server.ports.s3).running() as proxy:
        for name, value in own_server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint_url)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        store = Store.open(f"s3://{BUCKET}/root")
        run = Run.prepare(store, settings)
        assert run.plan is not None
        proxy.faults.unanswered = re.compile("PUT .*/batch-")  # larger than what is given up soon
        arguments = (store.uri, run.plan.plan_id, target)
        lane = multiprocessing.get_context("spawn").Process(target=_work, args=arguments)
        lane.start()
        assert proxy.holds_one.wait(120)
        fail(own_server)
        time.sleep(1.0)  # let other threads of it meet that
        lane.terminate()
        lane.join(120)
        has_ended = not lane.is_alive()
        lane.kill()
        lane.join()
        assert has_ended
