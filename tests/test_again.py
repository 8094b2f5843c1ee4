"""Runs that take up an earlier one: on which root, and on which state of the dataset."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.states import Completed

from flows import again
from flows.parameters import Extraction, Reextraction, Retry
from layertap.coordinator import Run
from layertap.dataset import TokenDataset
from layertap.records import MEMORY
from layertap.run_records import RunRecord, RunRecords
from layertap.store import Store
from tests.models import saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows
from tests.stored import extract

ASKED: dict[str, Any] = {"target": "org/model", "layer_ids": [1], "root": "a", "storage": "s3-bucket/old"}


@pytest.fixture(autouse=True)
def _store(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "open_store", lambda storage, root: folder_store)
    monkeypatch.setattr(again, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(again, "wait_for_turn", lambda _: True)


def asked(store: Store, dataset: str) -> None:
    request = Extraction.model_validate({**ASKED, "dataset": dataset}).model_dump()
    told = RunRecord(run_id="1", plan_id=None, started_at="", started_by="", request=request)
    RunRecords(store).put(told)


def test_a_root_that_was_moved_is_gone_on_with_where_it_is_now(folder_store: Store) -> None:
    asked(folder_store, "rows")
    form = again._last(Retry(root="b", storage="s3-bucket/new"))
    assert (form.root, form.storage, form.num_lanes, form.dataset) == ("b", "s3-bucket/new", 1, "rows")
    assert again._last(Retry(root="b", num_lanes=3)).num_lanes == 3


def out_of_the_way(folder: Path) -> Callable[[], object]:
    """Move the dataset away; returns what brings it back."""
    old = folder.rename(folder.with_name("old"))
    return lambda: old.exists() and old.rename(folder)


def not_written_to_its_end(folder: Path) -> Callable[[], object]:
    """Take the file away that is written last; returns what writes it."""
    last = folder / "state.json"
    text = last.read_text()
    last.unlink()
    return lambda: last.exists() or last.write_text(text)


@pytest.mark.parametrize("begin_writing", [out_of_the_way, not_written_to_its_end])
def test_a_dataset_that_is_being_written_when_it_is_looked_at_is_waited_for(
    begin_writing: Callable[[Path], Callable[[], object]],
    folder_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, dataset = saved(tiny_llama(), tmp_path / "target"), tmp_path / "rows"
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(20), dataset), target))
    assert run.plan is not None
    run_lane(folder_store, run.plan.plan_id, target)
    run.publish()
    asked(folder_store, str(dataset))
    end_writing = begin_writing(dataset)
    monkeypatch.setattr(again.time, "sleep", lambda _: end_writing())

    def extract(extraction: Extraction) -> Any:
        return Completed(message=f"{TokenDataset.open(extraction.dataset).num_rows} rows")

    monkeypatch.setattr(again, "extract_to_end", extract)
    assert again.reextract_when_changed.fn(Reextraction(root="a", still_s=1)).message == "20 rows"


def test_rows_without_memory_start_no_run_but_are_told_of_until_they_are_stored(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = save_rows(some_rows(20), tmp_path / "rows")
    settings = settings_for(dataset, saved(tiny_llama(), tmp_path / "target"))
    request = Extraction.model_validate({**ASKED, "dataset": dataset}).model_dump()
    monkeypatch.setattr(again, "extract_to_end", lambda _: pytest.fail("a run was started"))

    def told_after_a_run(num_refused: int) -> str | None:
        run = Run.prepare(folder_store, settings, request=request)
        assert run.plan is not None
        refused = [key.tobytes() for key in run.catalog.shard_rows(run.plan.plan_id, 0).keys[:num_refused]]
        extract(run.catalog, run.plan, refused=refused, fault=MEMORY)
        run.publish()
        end = again.reextract_when_changed.fn(Reextraction(root="a"))
        assert end.name == "Skipped"
        return end.message

    assert told_after_a_run(num_refused=2) == (
        "the dataset has not changed; 2 rows of version 1 were refused because a GPU had no memory for them: "
        f"`layertap retry {folder_store.uri}` tries them again"
    )
    assert told_after_a_run(num_refused=0) == "the dataset has not changed"


def test_a_run_that_another_one_looks_for_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(again, "wait_for_turn", lambda _: False)
    end = again.reextract_when_changed.fn(Reextraction(root="a"))
    assert (end.name, end.message) == ("Skipped", "a run that waits for its turn will look at the dataset")
