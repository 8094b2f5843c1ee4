"""Datasets on a store: staged once, whole, by content; and when a dataset counts as changed."""

import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layertap.dataset import TokenDataset
from layertap.dataset_files import MANIFEST, StoredDataset, local_files
from layertap.errors import DatasetError
from layertap.store import ObjectInfo, Store
from tests.runs import save_rows, some_rows


def upload(folder: Path, store: Store, name: str) -> StoredDataset:
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(f"{name}/{path.relative_to(folder)}", path.read_bytes())
    return StoredDataset(store, name)


@pytest.fixture
def stored(store: Store, tmp_path: Path) -> StoredDataset:
    save_rows(some_rows(20), tmp_path / "rows")
    return upload(tmp_path / "rows", store, "data/chats")


def test_a_staged_dataset_is_the_stored_one_and_is_fetched_once(
    stored: StoredDataset, tmp_path: Path
) -> None:
    staged = stored.stage(tmp_path / "cache")
    assert TokenDataset.open(staged).fingerprint == TokenDataset.open(tmp_path / "rows").fingerprint
    manifest = staged.parents[1] / MANIFEST
    written = manifest.stat().st_mtime_ns
    assert stored.stage(tmp_path / "cache") == staged
    assert manifest.stat().st_mtime_ns == written


def test_a_changed_dataset_is_staged_again_and_the_old_one_removed(
    stored: StoredDataset, store: Store, tmp_path: Path
) -> None:
    before, old = stored.files(), stored.stage(tmp_path / "cache")
    save_rows(some_rows(21), tmp_path / "new")
    upload(tmp_path / "new", store, "data/chats")
    assert stored.files() != before
    assert TokenDataset.open(stored.stage(tmp_path / "cache")).num_rows == 21
    assert not old.exists()


@pytest.mark.parametrize("name", ["*.arrow", MANIFEST])
def test_a_staged_file_that_was_damaged_is_fetched_again(
    stored: StoredDataset, tmp_path: Path, name: str
) -> None:
    stored.stage(tmp_path / "cache")
    damaged = next((tmp_path / "cache").rglob(name))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert TokenDataset.open(stored.stage(tmp_path / "cache")).num_rows == 20


def test_of_two_who_stage_at_once_both_have_it(
    stored: StoredDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Store.get_range
    found: list[Path] = []

    def get_range(self: Store, path: str, offset: int, nbytes: int) -> Any:
        if not found:
            found.append(tmp_path)
            found.append(stored.stage(tmp_path / "cache"))
        return honest(self, path, offset, nbytes)

    monkeypatch.setattr(Store, "get_range", get_range)
    assert stored.stage(tmp_path / "cache") == found[1]
    assert TokenDataset.open(found[1]).num_rows == 20


def test_what_cannot_get_its_name_is_told(stored: StoredDataset, tmp_path: Path) -> None:
    whole = stored.stage(tmp_path / "cache").parents[1]
    shutil.rmtree(whole)
    whole.write_text("a file of somebody else")
    with pytest.raises(DatasetError, match=rf"can't be staged as {whole}: .*Not a directory.*XDG_CACHE_HOME"):
        stored.stage(tmp_path / "cache")


def test_a_dataset_larger_than_memory_is_staged(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layertap.dataset_files.PART_BYTES", 1 << 20)
    monkeypatch.setattr("layertap.checksums.CHUNK_BYTES", 1 << 20)
    folder_store.put("rows.parquet", bytes(16 << 20))
    stored = StoredDataset(folder_store, "rows.parquet")
    tracemalloc.start()
    try:
        assert stored.stage(tmp_path / "cache") == stored.stage(tmp_path / "cache")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_a_dataset_that_changes_while_it_is_read_is_refused(
    stored: StoredDataset, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Store.get_range

    def get_range(self: Store, path: str, offset: int, nbytes: int) -> bytes:
        store.put("data/chats/dataset_info.json", b"{} ")
        return honest(self, path, offset, min(nbytes, self.head(path).size))

    monkeypatch.setattr(Store, "get_range", get_range)
    with pytest.raises(DatasetError, match="changed while it was read"):
        stored.stage(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_a_dataset_of_which_a_file_goes_while_it_is_read_is_refused_alike(
    stored: StoredDataset, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Store.list

    def listed(self: Store, prefix: str) -> list[ObjectInfo]:
        found = honest(self, prefix)
        store.delete([found[0].path])
        return found

    monkeypatch.setattr(Store, "list", listed)
    with pytest.raises(DatasetError, match="changed while it was read"):
        stored.stage(tmp_path / "cache")


def test_objects_that_stand_for_folders_are_left_out(
    stored: StoredDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, files = Store.list, stored.files()

    def listed(self: Store, prefix: str) -> list[ObjectInfo]:
        """As obstore tells of `data/chats/`, which the console of S3 makes."""
        marker = replace(honest(self, prefix)[0], path="data/chats", size=0)
        return [marker, *honest(self, prefix)]

    monkeypatch.setattr(Store, "list", listed)
    assert stored.files() == files
    assert TokenDataset.open(stored.stage(tmp_path / "cache")).num_rows == 20


def test_a_single_file_is_staged_too_and_none_is_named(store: Store, tmp_path: Path) -> None:
    store.put("rows.parquet", b"1234")
    assert StoredDataset(store, "rows.parquet").stage(tmp_path / "cache").read_bytes() == b"1234"
    with pytest.raises(DatasetError, match="there is no dataset at .*nothing.parquet"):
        StoredDataset(store, "nothing.parquet").stage(tmp_path / "cache")


def test_a_dataset_on_a_folder_changes_with_its_files(tmp_path: Path) -> None:
    folder = Path(save_rows(some_rows(3), tmp_path / "rows"))
    before = local_files(folder)
    assert local_files(folder) == before
    (folder / "state.json").touch()
    assert local_files(folder) != before
    with pytest.raises(DatasetError, match="there is no dataset at .*gone"):
        local_files(tmp_path / "gone")
