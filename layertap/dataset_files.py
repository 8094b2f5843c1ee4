"""Where a dataset's files lie, and whether they changed; those on a store are staged on this host's disk.

A staged dataset is named by what the store lists of it: keys, sizes and e-tags. So it is fetched once, and
again only when it changed.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path, PurePosixPath

from layertap.checksums import file_checksum
from layertap.errors import DatasetError, IntegrityError, NotFoundError
from layertap.progress import format_bytes
from layertap.store import ObjectInfo, Store

PART_BYTES = 64 << 20
MANIFEST = ".layertap-staged.json"

FileState = tuple[str, int, str]
"""Name of a file under the dataset, its size, and what changes with its content."""


def local_files(path: Path) -> tuple[FileState, ...]:
    """State of the files of a dataset on a folder, or of the one file that it is.

    Raises:
        DatasetError: there is nothing at the path.
    """
    if not path.exists():
        raise DatasetError(f"there is no dataset at {path}: a folder or a Parquet file is wanted")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return tuple((str(p.relative_to(path)), p.stat().st_size, str(p.stat().st_mtime_ns)) for p in files)


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/layertap/datasets`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layertap" / "datasets"


class StoredDataset:
    """A dataset on a store: the file or the folder `name` of it."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name

    @property
    def uri(self) -> str:
        """Its address."""
        return f"{self.store.uri}/{self.name}"

    def files(self) -> tuple[FileState, ...]:
        """State of its files, as the store lists them.

        Raises:
            DatasetError: there is nothing at the address.
        """
        found = self.store.list(self.name) or self._single()
        if not found:
            raise DatasetError(f"there is no dataset at {self.uri}: no object has that name or lies below it")
        folders = {str(folder) for info in found for folder in PurePosixPath(info.path).parents}
        # S3 consoles make an object for each folder, which has the folder's name and no byte.
        return tuple((o.path, o.size, o.e_tag or "") for o in found if o.size or o.path not in folders)

    def _single(self) -> list[ObjectInfo]:
        return [self.store.head(self.name)] if self.store.exists(self.name) else []

    def stage(self, cache: Path) -> Path:
        """Bring the dataset onto this host's disk, unless it is there; earlier states of it are removed.

        Returns:
            The folder or the file, whole.

        Raises:
            DatasetError: there is none, the disk is too small, it changed while it was read, or its place on
                the disk isn't free.
        """
        files = self.files()
        whole = cache / f"{_digest(self.uri)}-{_digest(files)}"
        if not _is_sound(whole):
            shutil.rmtree(whole, ignore_errors=True)
            cache.mkdir(parents=True, exist_ok=True)
            _check_space(cache, self.uri, files)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".staging-") as staging:
                self._fetch(files, Path(staging))
                self._name(Path(staging), whole)
                Path(staging).mkdir(exist_ok=True)
        for older in cache.glob(f"{_digest(self.uri)}-*"):
            if older != whole:
                shutil.rmtree(older, ignore_errors=True)
        return whole / self.name

    def _name(self, staging: Path, whole: Path) -> None:
        """Give what was fetched its name, unless another coordinator was first."""
        try:
            staging.rename(whole)
        except OSError as error:
            if not _is_sound(whole):
                raise DatasetError(
                    f"{self.uri} can't be staged as {whole}: {error}. Remove that, or move the cache with "
                    "XDG_CACHE_HOME"
                ) from error

    def _fetch(self, files: Sequence[FileState], folder: Path) -> None:
        changed = DatasetError(
            f"{self.uri} changed while it was read: start again once its writer is through"
        )
        try:
            sums = {name: self._fetch_file(name, size, folder / name) for name, size, _ in files}
        except (NotFoundError, IntegrityError) as error:  # gone, or shorter than it was listed
            raise changed from error
        if self.files() != tuple(files):
            raise changed
        (folder / MANIFEST).write_text(json.dumps(sums))

    def _fetch_file(self, name: str, size: int, path: Path) -> str:
        """Write an object to a file; returns its checksum."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for offset in range(0, size, PART_BYTES):
                file.write(self.store.get_range(name, offset, min(PART_BYTES, size - offset)))
        return file_checksum(path)


def _is_sound(folder: Path) -> bool:
    """Whether a staged dataset is there and its bytes are those that were fetched."""
    try:
        sums = json.loads((folder / MANIFEST).read_text())
        return all(file_checksum(folder / name) == kept for name, kept in sums.items())
    except (OSError, ValueError):  # not there, or not to be read: fetched again then
        return False


def _check_space(cache: Path, uri: str, files: Sequence[FileState]) -> None:
    needed, free = sum(size for _, size, _ in files), shutil.disk_usage(cache).free
    if needed > free:
        raise DatasetError(
            f"{uri} has {format_bytes(needed)}, but {cache} has {format_bytes(free)} left: make room, or "
            "move the cache with XDG_CACHE_HOME"
        )


def _digest(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()
