"""What only roots on folders have: unfinished files, files of the user, file systems that lack something."""

import errno
import os
from datetime import timedelta
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import pytest

from layertap.errors import StoreRefusedError
from layertap.folder import read_range
from layertap.garbage import find_garbage
from layertap.store import Store
from tests.stored import new_catalog

NOW = timedelta(0)


def test_temporary_files_of_killed_writers_are_found(folder_store: Store) -> None:
    new_catalog(folder_store)
    left = folder_store.local_path("plans/p/data/00000/a/batch-00000.safetensors")
    assert left is not None
    left.parent.mkdir(parents=True)
    left.with_name("batch-00000.safetensors#17").write_bytes(b"half")
    folder_store.put("check/0123", b"of a run that died while it tried the store")
    garbage = find_garbage(folder_store, older_than=NOW)
    assert list(garbage.reasons) == ["plans/p/data/00000/a/batch-00000.safetensors#17", "check/0123"]
    garbage.delete()
    assert not find_garbage(folder_store, older_than=NOW).reasons


def test_files_of_the_user_s_own_are_never_garbage(folder_store: Store) -> None:
    """Whatever they are called."""
    new_catalog(folder_store)
    for name in ("notes#3", "sub/draft#1", "plans#2", "layertap.json.bak#1"):
        path = folder_store.local_path(name)
        assert path is not None
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    assert not find_garbage(folder_store, older_than=NOW).reasons


class _EndsEarly(FileIO):
    """A read gives no more than a little: of Linux, less than 2 GiB."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:100]) or 0


@pytest.mark.parametrize("nbytes", [900, 2_000])
def test_a_range_is_read_to_its_end_or_the_file_s(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "x").write_bytes(data := os.urandom(1_000))
    with BufferedReader(_EndsEarly(tmp_path / "x")) as file:
        assert read_range(file, 10, nbytes) == data[10 : 10 + nbytes]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused_with_the_way_out(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuses)
    with pytest.raises(StoreRefusedError, match="no hard links.*another file system"):
        folder_store.create("layertap.json", b"{}")
    assert not folder_store.temporary_files()


def test_what_may_not_be_deleted_is_not_tried_again(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file that was made immutable."""

    def refuses(self: Path, **_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(self))

    folder_store.put("a", b"1")
    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(StoreRefusedError, match="can't delete .*/a: .*Operation not permitted"):
        folder_store.delete(["a"])
