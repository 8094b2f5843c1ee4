"""What is told of shards that failed: reason, place, traceback, log, and how to try them again."""

import logging
import os
import shlex
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from prefect import flow
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun

from deployments.run_commands import failures
from layertap.catalog import Catalog, Claim
from layertap.cli import main
from layertap.coordinator import Run
from layertap.errors import StoreRefusedError, TooManyRefusedError
from layertap.failures import (
    HOPELESS,
    TRIED_AGAIN,
    forget_failures,
    markdown,
    read_failures,
    watched_failures,
)
from layertap.lane import Lane
from layertap.lane_work import extract_in_threads
from layertap.plan import PlanSettings
from layertap.settled import way_out
from layertap.shard_state import ShardState, shard_state
from layertap.shard_table import put_shard_table
from layertap.store import Store
from layertap.verify import verify_root
from tasks.artifacts import FAILURES, show_failures
from tests.models import saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows
from tests.stored import printed_void


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_llama(), tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    """A fresh root whose address a shell takes in quotes alone."""
    return Store.folder(tmp_path / "my root")


@pytest.fixture
def run(folder_store: Store, tmp_path: Path, target: str) -> Run:
    return Run.prepare(folder_store, settings_for(save_rows(some_rows(40), tmp_path / "rows"), target))


def plan_id_of(run: Run) -> str:
    assert run.plan is not None
    return run.plan.plan_id


def fail_on(run: Run, shard: int, *lanes: str) -> None:
    for number, lane in enumerate(lanes, start=1):
        claim = run.catalog.claim(plan_id_of(run), shard, number, lane=lane, details={"host": "h1"})
        assert claim is not None
        run.catalog.fail(claim, {"error": f"ValueError: bad | on {lane}\nand more", "lane": lane})


def make_last_beat_old(run: Run, shard: int, number: int) -> None:
    beat = run.catalog.store.local_path(f"plans/{plan_id_of(run)}/state/{shard:05d}.claim-{number}")
    assert beat is not None
    a_minute_ago = beat.stat().st_mtime - 60
    os.utime(beat, (a_minute_ago, a_minute_ago))


def die_with(run: Run, shard: int, *lanes: str) -> None:
    for number, lane in enumerate(lanes, start=1):
        assert run.catalog.claim(plan_id_of(run), shard, number, lane=lane, details={"host": "h1"})


def test_a_lane_leaves_all_that_a_person_needs_to_find_the_reason(
    run: Run, folder_store: Store, target: str
) -> None:
    lane = Lane.open(folder_store, plan_id_of(run), run="run", target=target, name="lane-7")
    assert lane is not None
    honest = lane.extractor.extract_shard

    def broken(_rows: Any, _prefix: str, *, on_progress: Any, **_: Any) -> Any:
        logging.getLogger("layertap.extract").warning("it smells of burning")
        on_progress(3, 99)
        raise ValueError("broken")

    lane.extractor.extract_shard = broken  # type: ignore[method-assign]
    with lane:
        claim = lane.claim()
        assert claim is not None
        with pytest.raises(ValueError) as caught:
            lane.extract(claim)
        lane.fail(claim, caught.value)
        (failure,) = read_failures(run.catalog)
        lane.extractor.extract_shard = honest  # type: ignore[method-assign]
        extract_in_threads(lane)
    assert (failure.shard, failure.lane, failure.claim) == (claim.shard, "lane-7", 1)
    assert (failure.state, failure.num_failures, failure.num_rows_done) == (TRIED_AGAIN, 1, 3)
    assert failure.host and failure.device and len(failure.attempt) == 32
    assert "it smells of burning" in failure.log and "in broken" in failure.traceback
    assert read_failures(run.catalog) == []


def test_failures_say_whether_there_is_hope_and_forgetting_them_gives_it(run: Run) -> None:
    fail_on(run, 0, "a", "b")
    fail_on(run, 1, "a")
    found = read_failures(run.catalog)
    assert [(f.shard, f.state) for f in found] == [(0, HOPELESS), (1, TRIED_AGAIN)]
    forget_failures(run.catalog, plan_id_of(run))
    assert [f.shard for f in read_failures(run.catalog)] == [1]
    assert run.watch().poll().shards_by_state.get(ShardState.FAILED) is None


@pytest.mark.parametrize("rows", [b"damaged", None])
def test_a_shard_whose_rows_are_damaged_fails_with_a_way_out_that_helps(
    run: Run, folder_store: Store, target: str, rows: bytes | None
) -> None:
    path = f"plans/{plan_id_of(run)}/shard-00000.arrow"
    folder_store.delete([path]) if rows is None else folder_store.put(path, rows)
    (finding,) = verify_root(folder_store).findings
    assert finding.where == path and finding.way_out not in finding.problem
    run_lane(folder_store, plan_id_of(run), target)
    watch = run.watch()
    watch.poll()
    report = run.publish(watch)
    with pytest.raises(TooManyRefusedError, match="shard-00000.arrow.*withdraw them with `") as told:
        report.check(0.0)
    shown = CliRunner().invoke(failures, [folder_store.uri])
    page = markdown(read_failures(run.catalog), folder_store.uri, at_most=5)
    assert shown.exit_code == 1 and "can't be read any more" not in shown.output, "its error says it"
    for text in (str(told.value), report.markdown(), shown.output, page):
        assert printed_void(text) == ["void", folder_store.uri, plan_id_of(run), "0", "--withdraw"]
        assert "layertap retry" not in text and "Press Retry" not in text

    assert CliRunner().invoke(main, printed_void(str(told.value))).exit_code == 0
    again = Run.prepare(folder_store, run.preview.settings)
    run_lane(folder_store, plan_id_of(again), target)
    assert again.publish().version.complete


def test_lanes_that_died_in_silence_are_named_by_their_claims(run: Run) -> None:
    die_with(run, 2, "a", "b", "c", "d")
    run.catalog.release(Claim(plan_id=plan_id_of(run), shard=2, number=4, lane="d", token=""))
    (failure,) = read_failures(run.catalog, shards=[2])
    assert (failure.num_deaths, failure.state, failure.host) == (3, HOPELESS, "h1")
    assert (failure.lane, failure.claim) == ("c", 3), "whose lane was the last to die"
    assert "3 lanes died while they held shard 2" in failure.error


def test_a_run_whose_shard_ended_by_a_third_silent_death_says_that_it_failed_for_good(
    run: Run, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layertap.watch.BEAT_S", 0.01)
    watch = run.watch()
    die_with(run, 2, "a", "b", "c")
    while ShardState.FAILED not in watch.poll().shards_by_state:
        time.sleep(0.01)
    (failure,) = watched_failures(watch)
    assert (failure.state, failure.num_deaths, failure.lane) == (HOPELESS, 3, "c")
    row = pq.read_table(BytesIO(folder_store.get(put_shard_table(watch)))).to_pylist()[2]
    assert (row["state"], row["deaths"], row["lane"]) == ("failed", 3, "c")


def test_the_command_tells_a_third_silent_death_from_a_lane_at_work_by_the_age_of_its_beat(
    run: Run, folder_store: Store
) -> None:
    die_with(run, 2, "a", "b", "c")
    told = CliRunner().invoke(failures, [folder_store.uri])
    assert told.exit_code == 0 and "will be tried again, after 0 errors and 2 silent deaths" in told.output
    make_last_beat_old(run, 2, 3)
    told = CliRunner().invoke(failures, [folder_store.uri])
    assert told.exit_code == 1 and "failed for good, after 0 errors and 3 silent deaths" in told.output
    assert "layertap retry" in told.output


def test_with_keys_that_may_only_read_this_host_s_clock_tells_it_for_all_plans_and_that_is_said(
    run: Run,
    folder_store: Store,
    tmp_path: Path,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    more = save_rows(some_rows(40, seed=1), tmp_path / "more")
    for one in (run, Run.prepare(folder_store, settings_for(more, target))):
        die_with(one, 2, "a", "b", "c")
        make_last_beat_old(one, 2, 3)
    asked = list[str]()

    def refuses(self: Store, path: str, data: Any) -> None:
        asked.append(path)
        raise StoreRefusedError(f"can't put {path}: AccessDenied")

    monkeypatch.setattr(Store, "put", refuses)
    told = CliRunner().invoke(failures, [folder_store.uri])
    assert told.exit_code == 1 and told.output.count("after 0 errors and 3 silent deaths") == 2
    assert len(asked) == 1 and caplog.text.count("this host's clock") == 1
    assert f"can't put {asked[0]}: AccessDenied" in caplog.text


def test_a_retried_lane_finds_work_in_a_shard_that_took_three_lanes_away_though_the_last_died_just_now(
    run: Run,
) -> None:
    die_with(run, 2, "a", "b", "c")
    forget_failures(run.catalog, plan_id_of(run))
    names = run.catalog.snapshot(plan_id_of(run)).names[2]
    assert shard_state(names, stale=[3]).state == ShardState.STALE


def test_of_thousands_of_failures_some_are_read_at_once_and_the_plan_but_once(
    run: Run, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in (0, 1):
        fail_on(run, shard, "a", "b")
    both_are_read, plans_read, get = threading.Barrier(2), 0, folder_store.get

    def watched(path: str, *args: Any) -> bytes:
        nonlocal plans_read
        plans_read += path.endswith("plan.json")
        if ".fail-" in path:
            both_are_read.wait(timeout=60)
        return get(path, *args)

    monkeypatch.setattr(folder_store, "get", watched)
    failed = read_failures(Catalog(folder_store), plans=[plan_id_of(run)])
    assert ([failure.shard for failure in failed], plans_read) == ([0, 1], 2), (
        "by `settled` and for all shards"
    )


def test_the_page_has_a_line_for_each_and_the_way_to_retry(run: Run) -> None:
    fail_on(run, 0, "a", "b")
    text = markdown(read_failures(run.catalog), "/data/my root", at_most=5)
    assert "| 0 | ValueError: bad / on b | b |" in text
    assert "    layertap retry '/data/my root'" in text and "and more" in text


@pytest.mark.usefixtures("prefect_server")
def test_the_page_links_to_the_lane_of_each_shard_whose_run_is_known(run: Run) -> None:
    fail_on(run, 0, "a", "b")
    fail_on(run, 1, "a", "b-again-2")

    @flow
    def coordinator() -> FlowRun:
        with get_client(sync_client=True) as client:
            lane = client.create_flow_run(coordinator, name="b")
        show_failures(read_failures(run.catalog), "s3://b/root")
        return lane

    lane = coordinator()
    shown = str(Artifact.get(FAILURES).data)  # type: ignore[union-attr]
    assert f"| 0 | ValueError: bad / on b | [b](/v2/runs/flow-run/{lane.id}) |" in shown
    assert "| 1 | ValueError: bad / on b-again-2 | b-again-2 |" in shown


def test_the_command_tells_of_them_and_ends_with_status_1(run: Run, folder_store: Store) -> None:
    fail_on(run, 0, "a", "b")
    told = CliRunner().invoke(failures, [folder_store.uri])
    assert told.exit_code == 1
    assert f"try them again: layertap retry {shlex.quote(folder_store.uri)}\n" in told.output
    assert "1 shards have failed, 1 of them for good" in told.output
    assert CliRunner().invoke(failures, [folder_store.uri, "--shards", "1"]).exit_code == 0
    assert "'x' is not a list of shards" in CliRunner().invoke(failures, ["x", "--shards", "x"]).output


def test_failures_of_rows_that_another_plan_has_stored_count_no_more(
    run: Run, folder_store: Store, tmp_path: Path, target: str
) -> None:
    fail_on(run, 0, "a", "b")
    smaller = PlanSettings(max_batch_tokens=128, shard_tokens=600)
    again = Run.prepare(folder_store, settings_for(str(tmp_path / "rows"), target, plan=smaller))
    assert plan_id_of(again) != plan_id_of(run)
    assert CliRunner().invoke(failures, [folder_store.uri]).exit_code == 1
    run_lane(folder_store, plan_id_of(again), target)
    assert again.publish().version.complete
    told = CliRunner().invoke(failures, [folder_store.uri])
    assert (told.exit_code, told.output) == (0, "0 shards have failed, 0 of them for good\n")


def test_a_shard_whose_rows_are_damaged_is_told_of(run: Run, folder_store: Store) -> None:
    fail_on(run, 0, "a", "b")
    path = f"plans/{plan_id_of(run)}/shard-00000.arrow"
    whole = folder_store.get(path)
    folder_store.put(path, whole[:-1] + bytes([whole[-1] ^ 1]))
    told = CliRunner().invoke(failures, [folder_store.uri]).output
    assert "1 shards have failed" in told and "layertap retry" not in told
    assert f"can't be read any more. {way_out(folder_store.uri, plan_id_of(run), 0)}" in told
    fail_on(run, 1, "a", "b")
    assert "layertap retry" in CliRunner().invoke(failures, [folder_store.uri]).output


def test_the_advice_names_a_run_by_its_id(
    run: Run, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(run, 0, "a", "b")
    flow_run = uuid4()
    monkeypatch.setattr("deployments.run_commands.open_place", lambda *_: folder_store)
    monkeypatch.setattr("deployments.places.flow_run_of", lambda _: flow_run)
    told = CliRunner().invoke(failures, ["chats from rows"])
    assert told.output.endswith(f"layertap retry {flow_run}\n")
