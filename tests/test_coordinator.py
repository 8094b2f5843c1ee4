"""A run from its plan to its version, on a real store with a real small target, without a scheduler."""

import json
import re
import shlex
import shutil
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from layertap import lane as lane_module
from layertap import watch as watch_module
from layertap.catalog import Catalog
from layertap.cli import main
from layertap.coordinator import Run
from layertap.errors import (
    CatalogError,
    DatasetError,
    InputError,
    NotReadyError,
    SpecError,
    StoreRefusedError,
    TooManyRefusedError,
)
from layertap.failures import read_failures
from layertap.host import host_name
from layertap.plan import PlanSettings
from layertap.preview import Preview
from layertap.records import DATA, MEMORY, to_json
from layertap.run_records import RunRecords
from layertap.shard_state import ShardState
from layertap.store import Store
from layertap.versions import Versions
from tests.models import saved, tiny_llama
from tests.runs import assert_read_back, run_lane, save_rows, settings_for, some_rows
from tests.stored import REASONS, extract


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def target(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(model, tmp_path_factory.mktemp("target"))


def plan_id_of(run: Run) -> str:
    assert run.plan is not None
    return run.plan.plan_id


def test_a_run_stores_every_row_once_and_a_second_run_has_nothing_to_do(
    store: Store, tmp_path: Path, model: Any, target: str
) -> None:
    rows = some_rows(60)
    rows[7] = {**rows[3], "id": "equal to row 3", "loss_mask": [1] * len(rows[3]["input_ids"])}
    settings = settings_for(save_rows(rows, tmp_path / "rows"), target)
    run = Run.prepare(store, settings)
    lane = run_lane(store, plan_id_of(run), target)
    report = run.publish()
    report.check(0.0)
    assert report.version.complete and not report.missing
    assert lane.num_tokens == sum(len(row["input_ids"]) for row in rows) - len(rows[3]["input_ids"])
    assert_read_back(store, rows, model)

    again = Run.prepare(store, settings)
    assert again.plan is None
    assert again.publish().version == report.version


def test_an_interrupted_run_is_continued_not_cut_anew(
    folder_store: Store, tmp_path: Path, model: Any, target: str
) -> None:
    rows = some_rows(60)
    settings = settings_for(save_rows(rows, tmp_path / "rows"), target)
    first = Run.prepare(folder_store, settings)
    plan_id = plan_id_of(first)
    run_lane(folder_store, plan_id, target)
    kept = first.catalog.outcome(plan_id, 0).attempt
    lost = [f"plans/{plan_id}/state/{k:05d}.outcome" for k in (1, 2)]
    folder_store.delete(lost)  # as if these two shards had not been reached

    second = Run.prepare(folder_store, settings)
    assert plan_id_of(second) == plan_id
    done = run_lane(folder_store, plan_id, target, name="lane-1").committed
    assert sorted(outcome.shard for outcome in done) == [1, 2]
    assert second.catalog.outcome(plan_id, 0).attempt == kept
    second.publish().check(0.0)
    assert_read_back(folder_store, rows, model)


def test_a_run_begun_while_lanes_commit_goes_on_with_their_plan(
    folder_store: Store, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(save_rows(some_rows(60), tmp_path / "rows"), target)
    first = Run.prepare(folder_store, settings)
    plan_id = plan_id_of(first)
    run_lane(folder_store, plan_id, target)
    lost = [f"plans/{plan_id}/state/{k:05d}.outcome" for k in (1, 2)]
    to_come = [bytes(folder_store.get(lost[0]))]
    folder_store.delete(lost)  # as if lanes were still at work on these two shards
    missing_in = Preview.missing_in

    def missing_before_a_commit(preview: Preview, catalog: Catalog) -> NDArray[np.int64]:
        missing = missing_in(preview, catalog)
        if to_come:
            folder_store.put(lost[0], to_come.pop())
        return missing

    monkeypatch.setattr(Preview, "missing_in", missing_before_a_commit)
    second = Run.prepare(folder_store, settings)
    assert second.catalog.plans() == [plan_id]


def test_the_rest_of_a_plan_of_another_schema_gets_a_plan_of_its_own(
    folder_store: Store, tmp_path: Path, model: Any, target: str
) -> None:
    """As its error advises: to start the run again."""
    rows = some_rows(20)
    settings = settings_for(save_rows(rows, tmp_path / "rows"), target)
    older = plan_id_of(Run.prepare(folder_store, settings))
    path = f"plans/{older}/plan.json"
    folder_store.put(path, to_json({**json.loads(folder_store.get(path)), "schema": 0}))
    claim = Catalog(folder_store).claim(older, 0, 1, lane="older", details={})
    assert claim is not None
    Catalog(folder_store).fail(claim, {"lane": "older", "error": "ValueError: x"})

    def is_left_alone() -> bool:
        shown = CliRunner().invoke(main, ["status", folder_store.uri])
        assert shown.exit_code == 0, shown.output
        is_told = "of another schema or damaged; 1 waiting" in " ".join(shown.output.split())
        return is_told and not read_failures(Catalog(folder_store))

    assert is_left_alone()
    run = Run.prepare(folder_store, settings)
    assert plan_id_of(run) != older
    run_lane(folder_store, plan_id_of(run), target)
    run.publish().check(0.0)
    assert is_left_alone()
    assert_read_back(folder_store, rows, model)


def test_changed_masks_order_and_rows_compute_only_what_is_new(
    folder_store: Store, tmp_path: Path, model: Any, target: str
) -> None:
    rows = some_rows(50)
    first = Run.prepare(folder_store, settings_for(save_rows(rows, tmp_path / "v1"), target))
    run_lane(folder_store, plan_id_of(first), target)
    first.publish()

    remasked = [{**row, "loss_mask": [1 - m for m in row["loss_mask"]]} for row in reversed(rows)]
    second = Run.prepare(folder_store, settings_for(save_rows(remasked, tmp_path / "v2"), target))
    assert second.plan is None
    assert second.publish().version.number == 2
    assert_read_back(folder_store, remasked, model)
    assert_read_back(folder_store, rows, model, version=1)

    grown = remasked[:40] + some_rows(5, seed=1)
    third = Run.prepare(folder_store, settings_for(save_rows(grown, tmp_path / "v3"), target))
    assert third.plan is not None and third.plan.num_rows == 5
    run_lane(folder_store, plan_id_of(third), target)
    third.publish()
    assert_read_back(folder_store, grown, model)


def test_failed_shards_fail_the_run_by_name_and_the_same_run_again_retries_them(
    folder_store: Store, tmp_path: Path, model: Any, target: str
) -> None:
    rows = some_rows(40)
    settings = settings_for(save_rows(rows, tmp_path / "rows"), target)
    run = Run.prepare(folder_store, settings)
    plan_id = plan_id_of(run)
    for number, lane in enumerate(("lane-a", "lane-b"), start=1):
        claim = run.catalog.claim(plan_id, 0, number, lane=lane, details={})
        assert claim is not None
        run.catalog.fail(claim, {"lane": lane, "error": f"CudaError: broken on {lane}"})
    run_lane(folder_store, plan_id, target)
    watch = run.watch()
    seen = watch.poll()
    assert seen.finished and seen.percent < 100
    assert (seen.shards[0]["lane"], seen.shards[0]["error"]) == ("lane-b", "CudaError: broken on lane-b")

    report = run.publish(watch)
    assert not report.version.complete
    assert "CudaError: broken on lane-b" in report.markdown()
    with pytest.raises(
        TooManyRefusedError, match="1 shards failed, shard 0 with: CudaError: broken on lane-b"
    ):
        report.check(1.0)

    again = Run.prepare(folder_store, settings)
    assert plan_id_of(again) == plan_id
    assert [o.shard for o in run_lane(folder_store, plan_id, target).committed] == [0]
    again.publish().check(0.0)
    assert_read_back(folder_store, rows, model)


def test_shards_whose_lanes_died_in_silence_fail_the_run_and_are_retried_by_the_next(
    folder_store: Store, tmp_path: Path, model: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "BEAT_S", 0.05)
    rows = some_rows(40)
    settings = settings_for(save_rows(rows, tmp_path / "rows"), target, max_refused_share=1.0)
    run = Run.prepare(folder_store, settings)
    plan_id = plan_id_of(run)
    watch = run.watch()
    for number in (1, 2, 3):
        details = {"num_tokens": 100, "num_rows": 4}
        assert run.catalog.claim(plan_id, 0, number, lane=f"lane-{number}", details=details)
    run_lane(folder_store, plan_id, target)
    deadline = time.monotonic() + 10
    while not (seen := watch.poll()).finished and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seen.silent_lanes == {"lane-3"}, "it may run still, by what Prefect knows"
    assert seen.num_rows_done < len(rows) and seen.shards[0]["rows done"] == 0
    report = run.publish(watch)
    with pytest.raises(TooManyRefusedError, match="1 shards failed, shard 0 with: 3 lanes died"):
        report.check(1.0)
    with pytest.raises(TooManyRefusedError, match="version 1 is incomplete"):
        run.publish().check(1.0)

    again = Run.prepare(folder_store, settings)
    assert plan_id_of(again) == plan_id
    monkeypatch.setattr(lane_module, "BEAT_S", 0.2)
    assert [outcome.shard for outcome in run_lane(folder_store, plan_id, target).committed] == [0]
    again.publish().check(0.0)
    assert_read_back(folder_store, rows, model)


def test_a_run_with_other_planner_settings_cuts_a_plan_of_its_own(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    dataset = save_rows(some_rows(40), tmp_path / "rows")
    first = Run.prepare(folder_store, settings_for(dataset, target))
    other = settings_for(dataset, target, plan=PlanSettings(max_batch_tokens=64, shard_tokens=600))
    second = Run.prepare(folder_store, other)
    assert second.plan is not None and second.plan.settings == other.plan
    assert plan_id_of(second) != plan_id_of(first)


def test_progress_counts_what_is_settled_and_what_lanes_report(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(40), tmp_path / "rows"), target))
    plan_id, plan = plan_id_of(run), run.plan
    assert plan is not None
    watch = run.watch()
    assert watch.poll().percent == 0
    claim = run.catalog.claim(plan_id, 1, 1, lane="lane-x", details={})
    assert claim is not None
    run.catalog.beat(claim, {"num_tokens": 100, "num_rows": 4})
    seen = watch.poll()
    assert (seen.num_tokens_done, seen.num_rows_done, seen.lanes) == (100, 4, {"lane-x": 1})
    assert seen.shards[0] == {
        "shard": 1,
        "state": "claimed",
        "lane": "lane-x",
        "claims": 1,
        "failures": 0,
        "rows": plan.shards[1].num_rows,
        "rows done": 4,
        "tokens": plan.shards[1].num_tokens,
        "tokens done": 100,
        "tokens/s": 0,
        "ETA": "unknown",
        "error": "",
    }
    assert not seen.finished
    run.catalog.beat(claim, {"num_tokens": 110, "num_rows": 5})
    at_work = watch.poll().shards[0]
    assert at_work["tokens/s"] > 0 and at_work["ETA"] != "unknown"
    run.catalog.release(claim)
    run_lane(folder_store, plan_id, target)
    end = watch.poll()
    assert end.finished and end.percent == 100 and end.eta_s == 0
    assert end.shards_by_state == {ShardState.COMMITTED: len(plan.shards)}
    assert {row["lane"] for row in end.shards} == {"lane-0"}
    assert all(0 < row["tokens/s"] <= row["tokens"] and not row["ETA"] for row in end.shards)
    report = run.publish(watch)
    assert (report.work.num_rows, report.work.num_tokens) == (40, plan.num_tokens)
    assert report.work.num_bytes < sum(
        run.catalog.outcome(plan_id, k).nbytes for k in range(len(plan.shards))
    )
    assert f'HiddenStates("{folder_store.uri}", version=1)' in report.markdown()
    assert str(Run.prepare(folder_store, run.preview.settings).publish()).endswith("; 0 rows computed now")


def test_bad_rows_within_the_policy_are_named_and_beyond_it_refused_before_any_work(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    rows = some_rows(30)
    rows[4] = {**rows[4], "input_ids": [1, 512, 3], "loss_mask": [0, 1, 1]}
    dataset = save_rows(rows, tmp_path / "rows")
    where = f"On host {host_name()}, until the dataset changes, `layertap plan"
    beyond = rf"1 of 30 rows are refused, above .* 1\.00%. Mend .*{where} .*\n  row 4: [^\n]*512"
    with pytest.raises(TooManyRefusedError, match=beyond) as told:
        Run.prepare(folder_store, settings_for(dataset, target))
    assert re.search(r"refused: row 4: .*512", output_of_command_in(str(told.value)))
    assert not folder_store.list("plans")

    run = Run.prepare(folder_store, settings_for(dataset, target, max_refused_share=0.1))
    run_lane(folder_store, plan_id_of(run), target)
    report = run.publish()
    report.check(0.1)
    assert list(report.missing) == [4] and "512" in report.missing[4]
    assert report.version.complete
    assert Versions(folder_store).missing(report.version) == report.missing
    (line,) = re.findall(r"To look at them: .*", report.markdown())
    assert re.search(r"row 4 .*512", output_of_command_in(line))


def output_of_command_in(text: str) -> str:
    """What the one command shows that a text gives."""
    (command,) = re.findall(r"`layertap (.*?)`", text)
    return CliRunner().invoke(main, shlex.split(command), catch_exceptions=False).output


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        (DATA, r"Mend the dataset, or raise max_refused_share\."),
        (
            MEMORY,
            r"For 2 of them .* tries them again: start it where a GPU has more, .* Or raise max_ref\w+\.",
        ),
    ],
)
def test_rows_refused_while_extracting_are_named_with_what_helps_them_and_shows_them(
    fault: str, ways: str, tmp_path: Path, target: str
) -> None:
    store = Store.folder(tmp_path / "my root")
    run = Run.prepare(store, settings_for(save_rows(some_rows(40), tmp_path / "rows"), target))
    assert run.plan is not None
    keys = [run.catalog.shard_rows(run.plan.plan_id, k).keys[0].tobytes() for k in (0, 1)]
    extract(run.catalog, run.plan, refused=keys, fault=fault)
    report = run.publish()
    first, second = sorted(row for row, key in enumerate(run.preview.scan.keys) if key.tobytes() in keys)
    named = rf"\n  row {first}: {REASONS[fault]}\n  row {second}: {REASONS[fault]}$"
    with pytest.raises(TooManyRefusedError, match=rf"share of 1\.00%\. {ways} `.*{named}") as told:
        report.check(0.01)
    assert re.search(rf"row {second} .*{REASONS[fault]}", output_of_command_in(str(told.value)))
    (path,) = re.findall(rf"{re.escape(store.uri)}/(\S+) holds all", str(told.value))
    assert pq.read_table(BytesIO(store.get(path)))["index"].to_pylist() == [first, second]


def test_a_folder_without_room_is_refused_before_any_work(
    folder_store: Store, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    settings = settings_for(save_rows(some_rows(20), tmp_path / "rows"), target)
    with pytest.raises(StoreRefusedError, match="has 0.0 GB free, and .* GB are to be stored: make room"):
        Run.prepare(folder_store, settings)
    assert not [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    assert Run.prepare(folder_store, replace(settings, check_space=False)).plan is not None


def test_all_that_a_host_lacks_is_told_in_one_message(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").touch()
    settings = settings_for(str(tmp_path / "no dataset"), target, layer_ids=(4,))
    with pytest.raises(NotReadyError) as raised:
        Run.prepare(Store.folder(tmp_path / "file" / "root"), settings)
    told = str(raised.value)
    assert [type(one) for one in raised.value.findings][1:] == [DatasetError, SpecError]
    for part in ("can't begin the run: 3 findings", "fails at put", "no dataset", "layer ids [4] are out of"):
        assert part in told


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ((4,), r"layer ids \[4\] are out of range: this target has decoder layers 0 to 3"),
        ((0, 2, 2), r"layer ids \[0, 2, 2\] must be ascending and without repeats"),
    ],
)
def test_layers_that_are_not_there_or_asked_for_twice_are_refused(
    tmp_path: Path, target: str, layer_ids: tuple[int, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        Preview.make(settings_for(save_rows(some_rows(3), tmp_path / "rows"), target, layer_ids=layer_ids))


def test_a_dataset_overwritten_during_the_run_is_noticed(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    rows = some_rows(20)
    dataset = save_rows(rows, tmp_path / "rows")
    run = Run.prepare(folder_store, settings_for(dataset, target))
    run_lane(folder_store, plan_id_of(run), target)
    (file,) = Path(dataset).glob("*.arrow")
    data = bytearray(file.read_bytes())
    needle = bytes(b for t in rows[5]["input_ids"] for b in t.to_bytes(4, "little"))
    assert needle in data
    with file.open("r+b") as opened:  # in place: the mapping sees it
        opened.seek(data.index(needle))
        opened.write((3).to_bytes(4, "little"))
    with pytest.raises(DatasetError, match=file.name):
        run.publish()


def test_a_dataset_cut_short_or_replaced_during_the_run(
    folder_store: Store, tmp_path: Path, model: Any, target: str
) -> None:
    rows = some_rows(20)
    dataset = save_rows(rows, tmp_path / "rows")
    run = Run.prepare(folder_store, settings_for(dataset, target))
    run_lane(folder_store, plan_id_of(run), target)
    (file,) = Path(dataset).glob("*.arrow")
    kept = file.rename(file.with_suffix(".kept"))
    file.write_bytes(b"another dataset took the name; ours lives on in the mapping")
    run.publish().check(0.0)
    assert_read_back(folder_store, rows, model)
    with kept.open("r+b") as opened:
        opened.truncate(100)
    with pytest.raises(DatasetError, match=file.name):
        run.publish()


def test_a_root_remembers_what_its_runs_were_asked_to_do(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    settings = settings_for(save_rows(some_rows(40), tmp_path / "rows"), target)
    with pytest.raises(CatalogError, match="no run has left its settings in .*: start an extraction on it"):
        RunRecords(folder_store).latest()
    first = Run.prepare(folder_store, settings, request={"root": "a"}, started_by="flow-run-1")
    Run.prepare(folder_store, settings)
    record = RunRecords(folder_store).latest()
    assert (record.run_id, record.plan_id) == (first.run_id, plan_id_of(first))
    assert (record.request, record.started_by) == ({"root": "a"}, "flow-run-1")
    assert len(RunRecords(folder_store).all()) == 2


def test_chosen_shards_are_tried_again_and_no_others(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    settings = settings_for(save_rows(some_rows(40), tmp_path / "rows"), target)
    run = Run.prepare(folder_store, settings)
    for shard in (0, 1):
        for number, lane in enumerate(("lane-a", "lane-b"), start=1):
            claim = run.catalog.claim(plan_id_of(run), shard, number, lane=lane, details={})
            assert claim is not None
            run.catalog.fail(claim, {"error": "broken"})
    again = Run.prepare(folder_store, settings, shards=[1])
    assert again.watch().poll().shards_by_state[ShardState.FAILED] == 1
    assert 1 in [o.shard for o in run_lane(folder_store, plan_id_of(run), target).committed]
    with pytest.raises(InputError, match=r"shards \[1\] of plan .* can't be tried again: they are committed"):
        Run.prepare(folder_store, settings, shards=[0, 1])
