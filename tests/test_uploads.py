"""A lane killed in a write that matters: what is seen, who computes again, what stays behind."""

import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

import layertap.store
from layertap.cli import main
from layertap.coordinator import Run
from layertap.errors import NotFoundError
from layertap.garbage import find_garbage
from layertap.object_server import ObjectServer
from layertap.plan import PlanSettings
from layertap.store import Store
from layertap.verify import verify_root
from layertap.version_table import NOT_EXTRACTED
from tests.models import saved, tiny_llama
from tests.proxy import Proxy
from tests.runs import assert_read_back, run_lane, save_rows, settings_for, some_rows

SECOND_PART_OF_A_BATCH = re.compile(r"PUT .*/data/.*/batch-.*[?&]partNumber=2(&|$)")

OUTCOME = re.compile(r"(?:PUT )?/.*/state/(\d+)\.outcome$")


def hold_before_the_store_has_it(proxy: Proxy) -> None:
    proxy.faults.unanswered = OUTCOME


def hold_once_the_store_has_it(proxy: Proxy) -> None:
    proxy.faults.on_stored = lambda path: OUTCOME.match(path) and proxy.hold(path)


@pytest.fixture
def proxy(
    object_server: ObjectServer, aws_environment: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    """A proxy through which `Store.open` and child processes reach the server."""
    with Proxy(object_server.ports.s3).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint_url)
        yield proxy


def doomed_lane(uri: str, plan_id: str, target: str) -> None:
    """A lane whose large batches take several parts, of the smallest size that a store must take."""
    layertap.store.PART_BYTES = 5 << 20
    run_lane(Store.open(uri), plan_id, target, "doomed")


def kill_when_held(proxy: Proxy, *arguments: str) -> None:
    """Run a lane until the proxy keeps a request of it, then kill it."""
    lane = multiprocessing.get_context("spawn").Process(target=doomed_lane, args=arguments)
    lane.start()
    held = proxy.holds_one.wait(120)
    lane.kill()
    lane.join()
    assert held and lane.exitcode == -signal.SIGKILL


def test_a_lane_killed_in_mid_upload_leaves_parts_that_only_gc_sees(
    proxy: Proxy, s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layertap.lane.BEAT_S", 0.2)
    model, rows = tiny_llama(), some_rows(80, longest=250)
    settings = settings_for(
        save_rows(rows, tmp_path / "rows"),
        saved(model, tmp_path / "target"),
        max_length=256,
        plan=PlanSettings(max_batch_tokens=8192, shard_tokens=8192),  # 8 MB a batch
    )
    run = Run.prepare(s3_store, settings)
    assert run.plan is not None
    plan_id = run.plan.plan_id

    proxy.faults.unanswered = SECOND_PART_OF_A_BATCH
    kill_when_held(proxy, s3_store.uri, plan_id, settings.target)
    (half,) = {upload.path for upload in s3_store.open_uploads()}
    assert half not in [info.path for info in s3_store.list("plans")]
    with pytest.raises(NotFoundError):
        s3_store.get(half)
    assert set(run.publish().missing.values()) == {NOT_EXTRACTED}

    report = run_lane(s3_store, plan_id, settings.target, "next")
    shard = int(half.split("/")[3])
    again = next(outcome for outcome in report.committed if outcome.shard == shard)
    assert (again.claim, len(report.committed)) == (2, len(run.plan.shards))
    assert run.publish().version.complete
    assert_read_back(s3_store, rows, model)

    command = ["gc", s3_store.uri, "--older-than", "0"]
    shown = CliRunner().invoke(main, command)
    assert f"{half}: a multipart upload that nobody ended" in shown.output, shown.output
    assert [upload.path for upload in s3_store.open_uploads()] == [half]
    done = CliRunner().invoke(main, [*command, "--delete"])
    assert done.exit_code == 0, done.output
    assert not s3_store.open_uploads()
    verify_root(s3_store, num_rows=None).check()


@pytest.mark.parametrize(
    ("hold", "num_tries"), [(hold_before_the_store_has_it, 2), (hold_once_the_store_has_it, 1)]
)
def test_a_lane_killed_around_its_commit_costs_no_row_and_what_is_committed_is_not_computed_again(
    proxy: Proxy,
    s3_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold: Callable[[Proxy], None],
    num_tries: int,
) -> None:
    monkeypatch.setattr("layertap.lane.BEAT_S", 0.2)
    model, rows = tiny_llama(), some_rows(40)
    settings = settings_for(save_rows(rows, tmp_path / "rows"), saved(model, tmp_path / "target"))
    run = Run.prepare(s3_store, settings)
    assert run.plan is not None
    plan_id = run.plan.plan_id

    hold(proxy)
    kill_when_held(proxy, s3_store.uri, plan_id, settings.target)
    (shard,) = map(int, OUTCOME.findall(proxy.held))
    assert (shard in run.catalog.committed(plan_id)) == (num_tries == 1)

    report = run_lane(s3_store, plan_id, settings.target, "next")
    assert (shard in [outcome.shard for outcome in report.committed]) == (num_tries == 2)
    tries = s3_store.folders(f"plans/{plan_id}/data/{shard:05d}")
    claims = [name for name in run.catalog.snapshot(plan_id).names[shard] if name.startswith("claim-")]
    assert len(tries) == len(claims) == num_tries
    run.publish().check(0.0)
    assert_read_back(s3_store, rows, model)
    assert Run.prepare(s3_store, settings).plan is None


def test_parts_that_may_not_be_listed_are_said_and_the_rest_is_collected(
    proxy: Proxy, s3_store: Store, tmp_path: Path
) -> None:
    run = Run.prepare(
        s3_store,
        settings_for(save_rows(some_rows(10), tmp_path / "rows"), saved(tiny_llama(), tmp_path / "target")),
    )
    assert run.plan is not None
    s3_store.put(f"plans/{run.plan.plan_id}/data/00000/dead/batch-00000.safetensors", b"half")
    run_lane(s3_store, run.plan.plan_id, run.preview.settings.target)

    proxy.faults.forbidden = re.compile(r"GET .*[?&]uploads(=?&|=?$)")
    done = CliRunner().invoke(main, ["gc", s3_store.uri, "--older-than", "0", "--delete"])
    assert done.exit_code == 0, done.output
    assert re.search(
        r"multipart uploads can't be listed \(.*AccessDenied.*\): let a lifecycle rule abort incomplete ones",
        done.output,
    )
    assert not find_garbage(s3_store, older_than=timedelta(0)).reasons
    run.publish().check(0.0)
