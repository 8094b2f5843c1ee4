"""The cache on a local disk: bounded, shared, kept from epoch to epoch, never trusted."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap import HiddenStates
from layertap.cache import DiskCache
from layertap.errors import InputError
from layertap.store import Store
from tests.stored import dataset_of, extract, new_catalog, plan_for, publish, some_rows
from tests.test_stream import assert_is_row

ROWS = some_rows(30)


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*"))


@pytest.fixture
def filled(s3_store: Store, tmp_path: Path) -> Store:
    catalog = new_catalog(s3_store)
    dataset, scan = dataset_of(ROWS, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    return s3_store


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of which ranges are asked of any store."""
    asked: list[str] = []
    get_range = Store.get_range

    def counted(self: Store, path: str, offset: int, nbytes: int) -> Any:
        asked.append(path)
        return get_range(self, path, offset, nbytes)

    monkeypatch.setattr(Store, "get_range", counted)
    return asked


def test_the_second_epoch_asks_the_store_for_nothing(
    filled: Store, tmp_path: Path, requests: list[str]
) -> None:
    states = HiddenStates(filled, cache_dir=tmp_path / "cache")
    stream = states.stream()
    assert len(list(stream)) == 30
    assert requests
    requests.clear()
    for item in [*stream, states[3], *HiddenStates(filled, cache_dir=tmp_path / "cache").stream()]:
        assert_is_row(item)
    assert requests == []


def test_a_full_cache_keeps_what_it_has(filled: Store, tmp_path: Path, requests: list[str]) -> None:
    """A part of the rows is read from the disk in each epoch, and never more lies there than was allowed."""
    stream = HiddenStates(filled, cache_dir=tmp_path / "cache", cache_bytes=30_000).stream(window_bytes=1)
    for _ in range(3):
        assert len(list(stream)) == 30
        assert 20_000 < used(tmp_path / "cache") <= 30_000
    kept = {path.name for path in (tmp_path / "cache").glob("*/*")}
    list(stream)
    assert kept == {path.name for path in (tmp_path / "cache").glob("*/*")}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20), st.integers(1, 400)), max_size=40))
def test_the_bound_holds_whatever_is_put(tmp_path_factory: Any, puts: list[tuple[str, int, int]]) -> None:
    folder = tmp_path_factory.mktemp("cache")
    caches = {group: DiskCache(folder, group=group, max_bytes=1_000) for group in "ab"}
    for group, name, nbytes in puts:
        caches[group].put(str(name), bytes(nbytes))
        assert used(folder) <= 1_000


def test_rows_of_other_extractions_give_way_the_longest_unread_first(tmp_path: Path) -> None:
    old = DiskCache(tmp_path, group="old", max_bytes=1_000)
    for name in "abcd":
        old.put(name, bytes(250))
        os.utime(tmp_path / "old" / name, (1, 1))
    assert old.find("a")
    new = DiskCache(tmp_path, group="new", max_bytes=1_000)
    new.put("x", bytes(700))
    assert old.find("a") and new.find("x")
    assert [old.find(name) for name in "bcd"] == [None] * 3
    new.put("y", bytes(400))
    assert new.find("x") and not new.find("y")


def test_a_smaller_bound_is_kept_from_the_start(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, group="g", max_bytes=1_000)
    for name in "abcd":
        cache.put(name, bytes(250))
    DiskCache(tmp_path, group="g", max_bytes=600)
    assert used(tmp_path) == 500


def test_all_who_put_at_once_keep_the_bound_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with caches of their own stand for processes: each opens the lock anew."""
    pread = os.pread

    def slow(*arguments: Any) -> bytes:
        data = pread(*arguments)
        time.sleep(0.001)
        return data

    monkeypatch.setattr(os, "pread", slow)

    def put(k: int) -> None:
        cache = DiskCache(tmp_path, group="g", max_bytes=2_000)
        for i in range(30):
            cache.put(f"{k}-{i}", bytes(50))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(4)))
    assert used(tmp_path) == 2_000


@pytest.mark.parametrize("group", ["g", "other"])
def test_who_opens_while_another_has_counted_and_not_written_counts_that_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    cache, locked = DiskCache(tmp_path, group="g", max_bytes=1_000), DiskCache._locked

    @contextmanager
    def then_another_comes(self: DiskCache) -> Iterator[int]:
        with locked(self) as total:
            yield total
        monkeypatch.setattr(DiskCache, "_locked", locked)
        DiskCache(tmp_path, group=group, max_bytes=1_000).put("b", bytes(900))

    monkeypatch.setattr(DiskCache, "_locked", then_another_comes)
    cache.put("a", bytes(900))
    assert cache.find("a")
    assert used(tmp_path) == 900


def test_a_file_that_is_being_written_is_left_to_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, rename = DiskCache(tmp_path, group="g", max_bytes=1_000), Path.rename

    def once_another_came(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        DiskCache(tmp_path, group="other", max_bytes=1_000).put("b", bytes(900))
        return self.rename(target)

    monkeypatch.setattr(Path, "rename", once_another_came)
    cache.put("a", bytes(900))
    assert cache.find("a")


def test_what_a_killed_process_left_is_removed_and_counted_no_more(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, group="g", max_bytes=1_000)
    cache._reserve(tmp_path / "g" / ".half.0123", 900)
    os.utime(tmp_path / "g" / ".half.0123", (1, 1))
    again = DiskCache(tmp_path, group="g", max_bytes=1_000)
    again.put("a", bytes(950))
    assert again.find("a")
    assert [path.name for path in (tmp_path / "g").iterdir()] == ["a"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_fetched_anew(
    filled: Store, tmp_path: Path, requests: list[str], damage: str
) -> None:
    states = HiddenStates(filled, cache_dir=tmp_path / "cache")
    states[5]
    [path] = (tmp_path / "cache").glob("*/*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    if damage == "gone":
        path.unlink()
    requests.clear()
    assert_is_row(states[5])
    assert len(requests) == 1
    assert_is_row(states[5])
    assert len(requests) == 1


def test_on_a_folder_it_is_of_no_use_and_says_so(folder_store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(folder_store)
    publish(catalog, *dataset_of(ROWS, tmp_path / "rows.parquet"))
    with pytest.warns(UserWarning, match="cache_dir is of no use: .* is a folder itself"):
        HiddenStates(folder_store, version=1, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("max_bytes", [0, True, 1e9])
def test_a_bound_that_is_none_is_refused(tmp_path: Path, max_bytes: Any) -> None:
    with pytest.raises(InputError, match="cache_bytes is .*; it must be an integer of at least 1"):
        DiskCache(tmp_path, group="g", max_bytes=max_bytes)
