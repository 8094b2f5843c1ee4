"""What a root on a folder needs beyond obstore: files that outlive a loss of power, ranges, litter."""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from layertap.checksums import Buffer

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Answers of file systems without hard links, such as FAT and some network ones."""

TEMPORARY = re.compile(r".+#\d+")
"""Names of files, never listed, that obstore and this module write before they have their own."""


def create_file(root: Path, target: Path, data: Buffer) -> None:
    """Link a finished, synced file into place: who sees its name sees all of it, power loss or not.

    Raises:
        FileExistsError: there is one of that name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f"{target.name}#{secrets.randbits(63)}")
    try:
        staged.write_bytes(data)
        sync(staged)
        _link(staged, target)
    finally:
        staged.unlink(missing_ok=True)
    _sync_folders(root, target)


def _link(staged: Path, target: Path) -> None:
    try:
        os.link(staged, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        raise PermissionError(
            error.errno,
            "Operation not permitted: there are no hard links, by which a record is created once; "
            "give the root a folder on another file system",
        ) from error


def make_durable(root: Path, target: Path) -> None:
    """Let a file survive a loss of power, and the names of the folders above it."""
    sync(target)
    _sync_folders(root, target)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that gets its name when it is whole and outlives a loss of power."""
    part = path.with_name(f"{path.name}.part")
    yield part
    sync(part)  # or an empty file might have the name then
    part.replace(path)


def temporary_files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files that writers have begun and not named yet, or never will."""
    for path in root.rglob("*#*"):
        with contextlib.suppress(FileNotFoundError):  # its writer lives, and is done with it
            info = path.stat()
            if TEMPORARY.fullmatch(path.name) and stat.S_ISREG(info.st_mode):
                yield path, info


def read_range(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    """`nbytes` bytes of a file from `offset`, or as many as there are.

    A single read of Linux, such as `os.pread`, ends below 2 GiB, and rows may be longer: this one reads on.
    """
    file.seek(offset)
    return file.read(nbytes)


def _sync_folders(root: Path, target: Path) -> None:
    for folder in target.parents:
        sync(folder)
        if folder == root:
            return


def sync(path: Path) -> None:
    """Let the bytes of a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
