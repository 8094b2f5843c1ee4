"""Streams: each row once for whoever reads, and resumed exactly."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from layertap import HiddenStates
from layertap.collate import pad
from layertap.errors import InputError, IntegrityError
from layertap.store import Store
from layertap.stream import RowStream
from layertap.versions import Versions
from tests.processes import in_fresh_process
from tests.stored import dataset_of, extract, new_catalog, plan_for, publish, some_rows, states_of

NUM_ROWS = 61
ROWS = some_rows(NUM_ROWS)
SMALL_WINDOW = 9_000
"""Bytes of about four rows."""


def fill(store: Store, folder: Path) -> Store:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(ROWS, folder / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    return store


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    fill(Store.folder(folder / "root"), folder)
    return folder / "root"


@pytest.fixture(scope="module")
def states(root: Path) -> HiddenStates:
    return HiddenStates(root)


def forked(num_workers: int) -> dict[str, Any]:
    """Workers that start at once, without importing all anew."""
    return {"multiprocessing_context": "fork"} if num_workers else {}


def rows_in(batches: Any) -> list[int]:
    return [int(row) for batch in batches for row in batch["row"]]


def assert_is_row(item: dict[str, Any]) -> None:
    tokens = ROWS[item["row"]]["input_ids"][:50]
    layers, last = states_of(tokens)
    assert item["input_ids"].tolist() == tokens
    assert item["loss_mask"].tolist() == ROWS[item["row"]]["loss_mask"][:50]
    assert torch.equal(item["hidden_states"], layers)
    assert torch.equal(item["last_hidden_state"], last)


def test_rows_are_those_of_the_map(store: Store, tmp_path: Path) -> None:
    stream = HiddenStates(fill(store, tmp_path)).stream(window_bytes=SMALL_WINDOW, num_threads=3)
    first, second = list(stream), list(stream)
    for item in first:
        assert_is_row(item)
    assert sorted(item["row"] for item in first) == list(range(NUM_ROWS))
    assert sorted(item["row"] for item in second) == list(range(NUM_ROWS))
    assert [item["row"] for item in first] != [item["row"] for item in second]


def test_ranks_and_real_workers_share_the_rows(root: Path) -> None:
    in_fresh_process(_share_the_rows, root)


def _share_the_rows(root: Path) -> None:
    states = HiddenStates(root)
    for num_ranks, num_workers in [*((1 + k, k % 5) for k in range(8)), (2, 3), (3, 4), (5, 1)]:
        seen: list[int] = []
        num_steps = set()
        for rank in range(num_ranks):
            stream = states.stream(
                batch_size=3, rank=rank, num_ranks=num_ranks, window_bytes=SMALL_WINDOW, num_threads=1
            )
            batches = list(
                DataLoader(stream, batch_size=None, num_workers=num_workers, **forked(num_workers))
            )
            num_steps.add(len(batches))
            seen += rows_in(batches)
        assert sorted(seen) == list(range(NUM_ROWS)), (num_ranks, num_workers)
        assert len(num_steps) == 1


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("num_workers", range(5))
def test_any_ranks_and_workers_share_the_rows(
    states: HiddenStates, monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_workers: int
) -> None:
    """As a worker sees itself, without its process."""
    seen: list[int] = []
    num_steps = []
    for rank in range(num_ranks):
        stream = states.stream(
            batch_size=3, rank=rank, num_ranks=num_ranks, window_bytes=SMALL_WINDOW, num_threads=1
        )
        num_steps.append(0)
        for worker in range(max(1, num_workers)):
            info = SimpleNamespace(id=worker, num_workers=num_workers) if num_workers else None
            monkeypatch.setattr("layertap.stream.get_worker_info", lambda info=info: info)
            batches = list(stream)
            num_steps[-1] += len(batches)
            seen += rows_in(batches)
    assert sorted(seen) == list(range(NUM_ROWS))
    assert len(set(num_steps)) == 1


ways = st.sampled_from(
    [{}, {"batch_size": 4}, {"max_batch_tokens": 90, "collate": pad}, {"seed": None, "batch_size": 2}]
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways, st.integers(1, 4), st.integers(0, 3), st.integers(0, 20), st.integers(0, 2))
def test_resumed_anywhere_it_goes_on_exactly(
    states: HiddenStates, way: dict[str, Any], num_ranks: int, rank: int, step: int, epoch: int
) -> None:
    def opened() -> RowStream:
        return states.stream(
            rank=rank % num_ranks, num_ranks=num_ranks, window_bytes=SMALL_WINDOW, num_threads=2, **way
        )

    whole = opened()
    whole.set_epoch(epoch)
    expected = [*whole, *whole]
    cut = opened()
    cut.set_epoch(epoch)
    begun: Iterator[Any] = iter(cut)
    first = list(islice(begun, step))
    state = json.loads(json.dumps(cut.state_dict()))
    resumed = opened()
    resumed.load_state_dict(state)
    got = [*first, *resumed, *resumed]  # a third epoch where the first part was a whole one
    assert len(got) >= len(expected)
    for a, b in zip(got, expected, strict=False):
        assert torch.equal(torch.as_tensor(a["row"]), torch.as_tensor(b["row"]))
        assert torch.equal(a["hidden_states"], b["hidden_states"])


def test_a_loader_with_workers_resumes_with_as_many_and_with_others(root: Path) -> None:
    in_fresh_process(_resume_with_workers, root)


def _resume_with_workers(root: Path) -> None:
    states = HiddenStates(root)

    def opened() -> RowStream:
        return states.stream(batch_size=3, window_bytes=SMALL_WINDOW, num_threads=1)

    loader = opened().loader(3, **forked(3))
    expected = rows_in(loader)
    second_epoch = rows_in(loader)
    assert sorted(second_epoch) == list(range(NUM_ROWS)) and second_epoch != expected
    for num_steps in (0, 1, 2, 8, 19, 20):
        begun = opened().loader(3, **forked(3))
        first = rows_in(islice(begun, num_steps))
        state = json.loads(json.dumps(begun.state_dict()))
        again = opened().loader(3, **forked(3))
        again.load_state_dict(state)
        assert first + rows_in(again) == expected
        assert rows_in(again) == second_epoch
        for num_workers in (0, 2) if num_steps % 2 else (1, 4):
            other = opened().loader(num_workers, **forked(num_workers))
            other.load_state_dict(state)
            assert sorted(first + rows_in(other)) == list(range(NUM_ROWS))


def test_torchdata_keeps_the_state_of_workers(root: Path) -> None:
    in_fresh_process(_resume_with_torchdata, root)


def _resume_with_torchdata(root: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    states = HiddenStates(root)
    for num_workers in (0, 3):

        def opened(num_workers: int = num_workers) -> Any:
            stream = states.stream(batch_size=3, window_bytes=SMALL_WINDOW, num_threads=1)
            return StatefulDataLoader(stream, batch_size=None, num_workers=num_workers, **forked(num_workers))

        expected = rows_in(opened())
        assert sorted(expected) == list(range(NUM_ROWS))
        for num_steps in (8, 20):
            begun = opened()
            first = rows_in(islice(begun, num_steps))
            again = opened()
            again.load_state_dict(begun.state_dict())
            assert first + rows_in(again) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_killed_reader_loses_and_repeats_nothing(root: Path, tmp_path: Path, num_workers: int) -> None:
    """SIGKILL at some step, again and again; state and rows are one line of the consumer's log."""
    log = tmp_path / "log"
    spawn = multiprocessing.get_context("spawn")
    for num_steps in (1, 4, 100):
        process = spawn.Process(target=_train, args=(root, log, num_workers))
        process.start()
        target = len(_lines(log)) + num_steps
        while process.is_alive() and len(_lines(log)) < target:
            time.sleep(0.005)
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    seen = [row for line in _lines(log) for row in json.loads(line)["rows"]]
    assert sorted(seen) == list(range(NUM_ROWS))


def _lines(log: Path) -> list[str]:
    """Whole lines: a kill may cut the last one."""
    return log.read_text().split("\n")[:-1] if log.exists() else []


def _train(root: Path, log: Path, num_workers: int) -> None:
    stream = HiddenStates(root).stream(batch_size=4, window_bytes=SMALL_WINDOW)
    loader = stream.loader(num_workers, **forked(num_workers))
    lines = _lines(log)
    log.write_text("".join(line + "\n" for line in lines))
    if lines:
        loader.load_state_dict(json.loads(lines[-1])["state"])
    with log.open("a") as file:
        for batch in loader:
            print(
                json.dumps({"rows": batch["row"].tolist(), "state": loader.state_dict()}),
                file=file,
                flush=True,
            )
            time.sleep(0.05)


def test_a_pass_that_is_broken_off_begins_anew(states: HiddenStates) -> None:
    stream = states.stream(batch_size=4)
    first = rows_in(islice(stream, 3))
    whole = rows_in(stream)
    assert whole[:12] == first and sorted(whole) == list(range(NUM_ROWS))
    stream.set_epoch(0)
    assert rows_in(stream) == whole


def test_an_epoch_is_told_to_workers_that_live_on(root: Path) -> None:
    in_fresh_process(_tell_the_epoch, root)


def _tell_the_epoch(root: Path) -> None:
    stream = HiddenStates(root).stream(batch_size=4, num_threads=1)
    alone = [rows_in(stream.loader(2, **forked(2))) for _ in range(2)]
    assert alone[0] != alone[1]
    stream.set_epoch(0)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True, **forked(2))
    assert rows_in(loader) == alone[0]
    stream.set_epoch(1)
    assert rows_in(loader) == alone[1]
    with pytest.raises(InputError, match=r"only their loader knows .* stream\.loader"):
        stream.state_dict()
    with pytest.raises(InputError, match="persistent_workers keep their place"):
        stream.loader(2, persistent_workers=True)


def test_a_state_of_another_stream_is_refused(states: HiddenStates) -> None:
    state = states.stream(batch_size=4).state_dict()
    with pytest.raises(InputError, match=r"another stream \(seed: 1 here, 0 there\)"):
        states.stream(seed=1, batch_size=4).load_state_dict(state)
    with pytest.raises(InputError, match="content: .* here, 'other' in the state"):
        states.stream(batch_size=4).load_state_dict({**state, "content": "other"})


def test_a_state_of_another_format_is_refused(states: HiddenStates) -> None:
    """Whatever else it says, and also one that is none."""
    stream = states.stream(batch_size=4)
    of_later = {**stream.state_dict(), "format": 2, "num_rows": 5}
    for state, found in ((of_later, "2"), ({}, "None")):
        with pytest.raises(
            InputError,
            match=f"is of format {found}, .* from format 1 alone: .* begin an epoch anew with set_",
        ):
            stream.load_state_dict(state)


def test_a_damaged_row_is_named_at_its_place_and_the_rows_before_it_come(
    folder_store: Store, tmp_path: Path
) -> None:
    fill(folder_store, tmp_path)
    versions = Versions(folder_store)
    place = versions.rows(versions.get(1)).to_pylist()[17]
    data = bytearray(folder_store.get(place["file"]))
    data[place["offset"] + 3] ^= 1
    folder_store.put(place["file"], data)
    expected = HiddenStates(folder_store).stream(window_bytes=SMALL_WINDOW)
    got: list[int] = []
    with pytest.raises(IntegrityError, match=rf"{place['file']} is damaged: .* of row 17$"):
        got.extend(item["row"] for item in expected)
    batches = expected.batches(expected._start.read_by(1, 1))
    order = [int(batch.rows[0]) for batch in batches]
    assert got == order[: order.index(17)]


def test_no_more_than_two_windows_are_read_ahead(
    states: HiddenStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    submit = HiddenStates.submit

    def counted(self: HiddenStates, indices: Any, pool: Any) -> Any:
        asked.append(int(self.places.nbytes[list(indices)].sum()))
        return submit(self, indices, pool)

    monkeypatch.setattr(HiddenStates, "submit", counted)
    largest = int(states.places.nbytes.max())
    used = 0
    for batch in states.stream(batch_size=2, window_bytes=SMALL_WINDOW):
        used += int(states.places.nbytes[batch["row"]].sum())
        assert sum(asked) - used < 2 * (1.5 * SMALL_WINDOW + 2 * largest)
    assert len(asked) > 5


def test_an_empty_version_streams_nothing(folder_store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(folder_store)
    publish(catalog, *dataset_of(ROWS, tmp_path / "rows.parquet"))
    assert list(HiddenStates(folder_store, version=1).stream(batch_size=2)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank is 0 and num_ranks None: give both, or neither"),
        ({"rank": 2, "num_ranks": 2}, "rank is 2 of num_ranks 2: ranks count from 0"),
        ({"num_threads": 0}, "num_threads is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(
    states: HiddenStates, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        states.stream(**arguments)


def test_ranks_that_are_not_known_yet_are_not_guessed(
    states: HiddenStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="WORLD_SIZE is 4, but torch.distributed isn't initialised"):
        states.stream()


def test_ranks_are_those_of_torch_distributed(states: HiddenStates, tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        stream = states.stream()
        assert (stream.rank, stream.num_ranks) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
