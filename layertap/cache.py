"""Rows of a remote store kept on a local disk, within a bound, for all processes of a host."""

import fcntl
import os
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from layertap.errors import InputError
from layertap.store import Buffer

ABANDONED_S = 600
"""A file that is still being written after this time is left from a process that died."""


class DiskCache:
    """Files in a folder, of `max_bytes` together, whoever adds to them.

    An epoch reads each row once: a cache that let go of what was read longest ago would have lost each row
    before its next turn. So what is in it stays, and when it is full no more comes in; only rows of other
    extractions give way, the longest unread first.

    Args:
        folder: on a local disk; made if it isn't there. Nothing else may lie in it.
        group: names the extraction; rows of other groups give way.
        max_bytes: of all files together.

    Raises:
        InputError: `max_bytes` is no positive integer.
    """

    def __init__(self, folder: str | Path, *, group: str, max_bytes: int) -> None:
        if type(max_bytes) is not int or max_bytes < 1:
            raise InputError(f"cache_bytes is {max_bytes!r}; it must be an integer of at least 1")
        self.folder = Path(folder).expanduser().resolve()
        self.group = group
        self.max_bytes = max_bytes
        self._is_full = False
        (self.folder / group).mkdir(parents=True, exist_ok=True)
        with self._locked() as total:
            _write_total(total, self._evict(0))

    def find(self, name: str) -> Path | None:
        """The file of that name, marked as read just now; it may be gone at any time."""
        path = self.folder / self.group / name
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def put(self, name: str, data: Buffer) -> None:
        """Keep a file if there is room; others see all of it or nothing."""
        path = self.folder / self.group / name
        if self._is_full or path.exists():
            return
        staged = path.with_name(f".{name}.{secrets.token_hex(4)}")
        try:
            if self._reserve(staged, len(data)):
                with staged.open("r+b") as file:
                    file.write(data)
                staged.rename(path)
        except OSError as error:
            staged.unlink(missing_ok=True)
            self._is_full = True
            warnings.warn(f"no more rows are kept in {self.folder}: {error}", stacklevel=2)

    def drop(self, name: str) -> None:
        """Forget a file that turned out damaged."""
        (self.folder / self.group / name).unlink(missing_ok=True)

    def _reserve(self, staged: Path, nbytes: int) -> bool:
        """Make a file of that size, if need be in place of others; False if there is no room.

        It has its size before others count what lies there.
        """
        with self._locked() as total:
            used = int(os.pread(total, 20, 0) or 0)
            if used + nbytes > self.max_bytes:
                used = self._evict(nbytes)
            self._is_full = used + nbytes > self.max_bytes
            if not self._is_full:
                with staged.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                used += nbytes
            _write_total(total, used)
        return not self._is_full

    def _evict(self, nbytes: int) -> int:
        """Delete what must or may go, until `nbytes` fit; returns the bytes that stay."""
        files = sorted(self._files(), key=lambda f: (f[0].parent.name == self.group, f[1].st_mtime))
        used = sum(stat.st_size for _, stat in files)
        for path, stat in files:
            is_own = path.parent.name == self.group
            if used <= self.max_bytes and (is_own or used + nbytes <= self.max_bytes):
                break
            if not path.name.startswith("."):  # its writer is at it
                path.unlink(missing_ok=True)
                used -= stat.st_size
        return used

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for group in self.folder.iterdir():
            for entry in os.scandir(group) if group.is_dir() else ():
                with suppress(FileNotFoundError):
                    stat = entry.stat()
                    if entry.name.startswith(".") and stat.st_mtime < time.time() - ABANDONED_S:
                        os.unlink(entry.path)
                    else:
                        yield Path(entry.path), stat

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file with the bytes used, held against other processes and threads."""
        total = os.open(self.folder / "total", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(total, fcntl.LOCK_EX)
            yield total
        finally:
            os.close(total)

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.folder, self.group, self.max_bytes))


def _write_total(total: int, nbytes: int) -> None:
    os.pwrite(total, b"%020d" % nbytes, 0)


def _reopen(folder: Path, group: str, max_bytes: int) -> DiskCache:
    return DiskCache(folder, group=group, max_bytes=max_bytes)
