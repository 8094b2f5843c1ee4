"""From a path to memory-mapped record batches.

Three forms of a tokenised dataset are read:

- A folder written by Hugging Face `save_to_disk`: `state.json` names the data files and their order; the
  files are Arrow IPC *streams*. A stream cut between two record batches still reads without an error, so
  a file counts as whole only if it ends with the end-of-stream marker. `data-*.arrow` files that it doesn't
  name are refused; others (`datasets` puts its caches there) are none of ours.
- A folder of such folders, one for each split, with `dataset_dict.json`.
- A `.parquet` file, or a folder of them in the order of their names. Parquet can't be mapped: at every
  open the wanted columns are converted to Arrow streams in a temporary folder (`TMPDIR` moves it). The
  files are mapped and unlinked, so their space comes back with the last reference, however the process
  ends.

Reading a mapped page that a truncation took away kills the process, so a `Witness` tells beforehand, from
the file's status alone, whether a mapped file was written to.
"""

import json
import os
import shutil
import struct
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from layertap.errors import DatasetError

BATCH_ROWS = 4096
"""Rows of a record batch that is written, and of the slices in which a dataset is scanned."""

END_OF_STREAM = struct.pack("<Ii", 0xFFFFFFFF, 0)
"""The continuation marker and a length of 0: the last bytes of every finished Arrow stream."""


class Witness:
    """A mapped file's size and time of writing when it was opened, and a descriptor to ask again.

    The descriptor is of the mapped inode: deleting the file, or renaming another one over it, harms nothing.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._opened = os.fstat(self._descriptor)

    def check(self) -> None:
        """Touch no mapped page, and raise a DatasetError if the file was truncated or written to."""
        with _named(self._path):
            now = os.fstat(self._descriptor)
        if now.st_size != self._opened.st_size:
            change = f"it had {self._opened.st_size} bytes and has {now.st_size}"
        elif now.st_mtime_ns != self._opened.st_mtime_ns:
            change = "it was written to"
        else:
            return
        raise DatasetError(
            f"{self._path} was overwritten in place since it was opened: {change}. Start again on the "
            "dataset as it is now, and save a changed dataset into another folder"
        )

    def is_at(self, path: Path) -> bool:
        """Whether the path still leads to the file that was opened."""
        return os.path.samestat(self._opened, path.stat())


@dataclass(frozen=True)
class DataFile:
    """One file of a dataset."""

    name: str
    """The path, for messages."""

    column_names: list[str]
    """All columns of the file; the batches of a Parquet file hold the wanted ones only."""

    batches: list[pa.RecordBatch]

    witness: Witness | None = None
    """Of the mapped file, where others may write to it."""


@dataclass(frozen=True)
class DataFiles:
    """The files of a dataset, in order, and where what is said about them lies."""

    files: list[DataFile]

    folders: list[Path]
    """Where a provenance.json may lie, nearest first."""


def open_files(path: Path, *, split: str | None, wanted: Sequence[str]) -> DataFiles:
    """Map the files of the dataset at `path`.

    Raises:
        DatasetError: there is no dataset, the split doesn't exist or isn't named, a file is missing or cut.
    """
    if not path.exists():
        raise DatasetError(
            f"{path} does not exist; give a save_to_disk folder, or Parquet as a file or folder"
        )
    if (path / "dataset_dict.json").is_file():
        return _open_split(path, split)
    if split is not None:
        raise DatasetError(
            f"{path} has no splits (no dataset_dict.json), so {split!r} can't be chosen: leave it out"
        )
    if (path / "state.json").is_file():
        return DataFiles(_open_saved(path), [path])
    return DataFiles(_open_parquet(path, wanted), [path])


def _open_split(path: Path, split: str | None) -> DataFiles:
    splits = _read_json(path / "dataset_dict.json").get("splits", [])
    if split is None and len(splits) != 1:
        raise DatasetError(f"{path} holds the splits {', '.join(splits)}: name one of them with --split")
    split = split or splits[0]
    if split not in splits:
        raise DatasetError(f"{path} has no split {split!r}; it holds {', '.join(splits)}")
    return DataFiles(_open_saved(path / split), [path / split, path])


def _open_saved(folder: Path) -> list[DataFile]:
    if not (folder / "state.json").is_file():
        raise DatasetError(f"{folder} has no state.json: the folder was not written to its end")
    state = _read_json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DatasetError(
            f"{folder} reorders its rows by an index file; save it again with a newer `datasets`"
        )
    names = [entry["filename"] for entry in state["_data_files"]]
    _refuse_unlisted(folder, names)
    return [_open_stream(folder / name) for name in names]


def _refuse_unlisted(folder: Path, names: Sequence[str]) -> None:
    unlisted = sorted({file.name for file in folder.glob("data-*.arrow")} - set(names))
    if unlisted:
        raise DatasetError(
            f"{folder / unlisted[0]} is not named by state.json, so its rows would be left out: remove it "
            "if an earlier save left it there, or save the dataset again into an empty folder"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DatasetError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DatasetError(f"{path} holds no JSON object")
    return content


def read_provenance(folders: Sequence[Path]) -> dict[str, Any] | None:
    """The nearest provenance.json, or None."""
    found = [folder / "provenance.json" for folder in folders if (folder / "provenance.json").is_file()]
    return _read_json(found[0]) if found else None


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of Arrow and of the file system, told as ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset names it, but it isn't there") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path} can't be read: {error}") from error


def _open_stream(path: Path) -> DataFile:
    """Map one finished Arrow stream; its batches point into the mapping."""
    with _named(path):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - len(END_OF_STREAM)))
            witness = Witness(path, file)
            if file.read() != END_OF_STREAM:
                raise DatasetError(
                    f"{path} is cut short: its {size} bytes don't end with Arrow's end-of-stream marker. "
                    f"Copy or write the file again"
                )
        mapped = pa.memory_map(str(path))
        if not witness.is_at(path):
            raise DatasetError(f"{path} was replaced while it was opened: start again")
        with pa.ipc.open_stream(mapped) as reader:
            _refuse_repeated(path, reader.schema.names)
            return DataFile(str(path), reader.schema.names, list(reader), witness)


def _refuse_repeated(path: Path, names: Sequence[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DatasetError(f"{path} has more than one column {repeated[0]!r}: rename or remove all but one")


def _parquet_files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".parquet":
        return [path]
    if path.is_file():
        raise DatasetError(
            f"{path} is not a .parquet file. Chats in a JSONL file become a dataset with `layertap prepare`"
        )
    found = sorted(
        file
        for file in path.rglob("*.parquet")
        if not any(part[0] in "._" for part in file.relative_to(path).parts)
    )
    files = [file for file in found if file.parent == path]
    nested = [file for file in found if file.parent != path]
    if nested:
        raise DatasetError(
            f"{nested[0]} lies in a subfolder, and only the Parquet files right in {path} are read: give one "
            "folder that holds all of the dataset's files, or the subfolder itself"
        )
    if not files:
        raise DatasetError(
            f"{path} is no dataset: it holds neither state.json, dataset_dict.json nor *.parquet"
        )
    return files


def _open_parquet(path: Path, wanted: Sequence[str]) -> list[DataFile]:
    with tempfile.TemporaryDirectory(prefix="layertap-parquet-") as scratch:
        return [
            _open_converted(file, Path(scratch) / f"{number}.arrow", wanted)
            for number, file in enumerate(_parquet_files(path))
        ]


def _open_converted(source: Path, target: Path, wanted: Sequence[str]) -> DataFile:
    """Write the wanted columns as an Arrow stream and map it."""
    with _named(source), pq.ParquetFile(source, memory_map=True) as file:
        schema = file.schema_arrow
        _refuse_repeated(source, schema.names)
        names = [name for name in wanted if name in schema.names]
        _check_space(target.parent, file.metadata, names, source)
        with pa.ipc.new_stream(str(target), pa.schema([schema.field(name) for name in names])) as writer:
            for batch in file.iter_batches(BATCH_ROWS, columns=names):
                writer.write_batch(batch.select(names))
    return DataFile(str(source), schema.names, _open_stream(target).batches)


def _check_space(folder: Path, metadata: pq.FileMetaData, names: Sequence[str], source: Path) -> None:
    """Refuse a conversion that can't fit: integers take no less in Arrow than encoded in Parquet."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    needed = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in names)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DatasetError(
            f"{source} takes at least {needed} bytes in {folder} once converted, of which {free} are free; "
            "set TMPDIR to a larger disk"
        )
