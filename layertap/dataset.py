"""Tokenised datasets: their rows, what is wrong with a row, and what identifies a row and the whole.

A dataset has a column `input_ids` and may have `loss_mask` and `id`, under these or other names. The
lists may be `list`, `large_list`, `list_view` or `fixed_size_list` of any integer type (the mask also of
bool), in any number of files and record batches: rows, keys and fingerprint don't depend on it. Files are
memory-mapped and rows are views into the mapping; `arrow_files.py` says which forms of files. No token id
ever passes through a float or an unchecked narrowing cast.

**The policy for a bad row**: it is refused with its number and the offending value, and all other rows
keep their numbers. A row is refused if it is null or empty, holds a null or an id outside `0..vocab_size
- 1`, if its mask is null, has another length or a value other than 0 and 1, if an `attention_mask` column
says that it is padded, or, with `too_long="refuse"`, if it is longer than `max_length`. The whole row is
judged, also the part that truncation cuts off: an id that makes no sense says that the row is broken. A
dataset with a column that a causal forward pass over `input_ids` can't honour (own position ids, images)
is refused as a whole. A column of Arrow's type null, which is what a column without any value is saved as,
counts as absent under its default name, with a warning.

**Identity**: the extraction key of a row is the blake2b-128 of its truncated ids as little-endian int32.
The fingerprint of a dataset covers every column that is read, raw and in row order, refused rows included,
and nothing else: no path, no time, no list type.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from layertap.arrow_files import BATCH_ROWS, DataFile, open_files, read_provenance
from layertap.columns import Digest, Lists, is_integer_list, is_text, to_numpy
from layertap.errors import DatasetError
from layertap.keys import KEY_BYTES, extraction_key

logger = logging.getLogger(__name__)

INPUT_IDS, LOSS_MASK, ROW_ID, ATTENTION_MASK = "input_ids", "loss_mask", "row_id", "attention_mask"
"""What a column is read as, whatever its name."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    INPUT_IDS: np.dtype("<i4"),
    LOSS_MASK: np.dtype("u1"),
    ROW_ID: np.dtype("u1"),
    ATTENTION_MASK: np.dtype("u1"),
}
"""In which dtype a column is handed out and hashed; an id is hashed as its UTF-8."""

UNSUPPORTED_COLUMNS = (
    "position_ids",
    "seq_idx",
    "cu_seqlens",
    "cu_seq_lens_q",
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "input_features",
)
"""Columns that change what a target computes from `input_ids`."""

BLOCK_TOKENS = 16
"""Tokens of the largest block that a drafter of the DFlash kind predicts at once; in others it is 7 or 8."""

TooLong = Literal["truncate", "refuse"]

Fault = tuple[int, str]
"""A row's number within its slice, and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of the columns. Mask and id are optional under their default names, required under others."""

    input_ids: str = "input_ids"
    loss_mask: str = "loss_mask"
    row_id: str = "id"


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What is in a dataset, row by row."""

    num_tokens: NDArray[np.int32]
    """[rows] tokens after truncation, 0 where refused."""

    keys: NDArray[np.uint8]
    """[rows, 16] extraction keys, zeros where refused."""

    num_supervised: NDArray[np.int32]
    """[rows] kept tokens under the loss mask; all of them in a dataset without a mask."""

    refused: dict[int, str]
    """Row -> one sentence with its number and the offending value."""

    num_truncated: int

    fingerprint: str
    """The dataset's."""

    @property
    def has_few_supervised(self) -> NDArray[np.bool_]:
        """[rows] whether a row that isn't refused has fewer supervised tokens than a block."""
        return (self.num_tokens > 0) & (self.num_supervised < BLOCK_TOKENS)

    def unique(self, *, settled: NDArray[np.uint8] | None = None) -> NDArray[np.int64]:
        """First row of each distinct key that is not among the `settled` keys [m, 16]; ascending int64."""
        rows = np.flatnonzero(self.num_tokens)
        known = np.empty((0, KEY_BYTES), np.uint8) if settled is None else settled
        words = np.concatenate([known, self.keys[rows]]).view(np.uint64)
        order = np.lexsort((words[:, 0], words[:, 1]))  # stable: of equal keys the settled comes first
        is_first = np.ones(len(order), bool)
        is_first[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
        firsts = order[is_first] - len(known)
        return np.sort(rows[firsts[firsts >= 0]])


class TokenDataset:
    """A tokenised dataset, memory-mapped and read-only. Made by `open`."""

    num_rows: int
    has_loss_mask: bool
    has_ids: bool

    provenance: dict[str, Any]
    """The folder's provenance.json with `recorded: True`, or `recorded: False` where there is none."""

    def __init__(
        self, files: Sequence[DataFile], columns: Columns, provenance: dict[str, Any] | None
    ) -> None:
        self.columns = columns
        self._witnesses = [file.witness for file in files if file.witness]
        self.provenance = {"recorded": provenance is not None, **(provenance or {})}
        self._names = _find_columns(files, columns)
        batches = [batch for file in files for batch in file.batches]
        self._columns = {
            role: [batch.column(name) for batch in batches] for role, name in self._names.items()
        }
        self._starts: list[int] = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()
        self.num_rows = self._starts[-1]
        if self.num_rows == 0:
            raise DatasetError(
                f"no rows in {', '.join(file.name for file in files) or 'a dataset without files'}"
            )
        self.has_loss_mask = LOSS_MASK in self._names
        self.has_ids = ROW_ID in self._names
        self._fingerprint: str | None = None

    @classmethod
    def open(
        cls, path: str | Path, *, split: str | None = None, columns: Columns | None = None
    ) -> "TokenDataset":
        """Map a `save_to_disk` folder, a split of one, or Parquet; token ids are not read yet.

        Raises:
            DatasetError: no dataset, split or column of that name; a column of another type; a file that is
                missing, cut or corrupt; columns that a causal forward pass can't honour; no rows.
        """
        columns = columns or Columns()
        _refuse_shared(columns)
        opened = open_files(Path(path), split=split, wanted=list(_names_of(columns).values()))
        return cls(opened.files, columns, read_provenance(opened.folders))

    def check_unchanged(self) -> None:
        """Look, without reading a row, whether the mapped files still hold what they held at `open`.

        To be called before rows are read again after a long time: reading what a truncation took away kills
        the process. Deleted files, and files that another one was renamed over, are intact in their mapping.
        Parquet is read from a copy that nobody else can reach.

        Raises:
            DatasetError: a file was truncated or written to in place; says which.
        """
        for witness in self._witnesses:
            witness.check()

    @property
    def fingerprint(self) -> str:
        """32 hex digits over the contents in row order; reads the dataset once, unless it was scanned."""
        if self._fingerprint is None:
            digest = Digest({role: DTYPES[role] for role in self._names})
            for _, part in self._slices():
                digest.update(part)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def input_ids(self, row: int) -> NDArray[np.int32]:
        """All token ids of a row, int32 [raw length]; a read-only view where they are int32 in the file.

        Raises:
            DatasetError: the row is null or holds something that is no int32; `scan` refuses such rows.
        """
        return self._row(INPUT_IDS, row)

    def loss_mask(self, row: int) -> NDArray[np.uint8] | None:
        """Loss mask of a row, uint8 [raw length], or None in a dataset without; raises as `input_ids`."""
        return self._row(LOSS_MASK, row) if self.has_loss_mask else None

    def user_id(self, row: int) -> str | None:
        """The row's own id as text, or None where it has none."""
        value = self._cell(ROW_ID, row).as_py() if self.has_ids else None
        return None if value is None else str(value)

    def scan(self, *, vocab_size: int, max_length: int, too_long: TooLong = "truncate") -> Scan:
        """Judge, count and hash every row in one pass.

        Args:
            vocab_size: rows of the target's embedding; ids are below it.
            max_length: tokens of a row that are kept.
            too_long: whether a longer row is cut or refused.
        """
        digest = Digest({role: DTYPES[role] for role in self._names})
        scanner = _Scanner(self._names, vocab_size=vocab_size, max_length=max_length, too_long=too_long)
        for first_row, part in self._slices():
            digest.update(part)
            scanner.add(first_row, part)
        self._fingerprint = digest.hexdigest()
        return scanner.finish(self._fingerprint)

    def _slices(self) -> Iterator[tuple[int, dict[str, Lists]]]:
        """First row and columns of each slice; slices bound what a pass holds beside the mapping."""
        for number, start in enumerate(self._starts[:-1]):
            for offset in range(0, self._starts[number + 1] - start, BATCH_ROWS):
                yield (
                    start + offset,
                    {
                        role: (Lists.of_text if role == ROW_ID else Lists.of)(
                            arrays[number].slice(offset, BATCH_ROWS)
                        )
                        for role, arrays in self._columns.items()
                    },
                )

    def _cell(self, role: str, row: int) -> Any:
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} is outside 0..{self.num_rows - 1}")
        number = bisect_right(self._starts, row) - 1
        return self._columns[role][number][row - self._starts[number]]

    def _row(self, role: str, row: int) -> NDArray[Any]:
        values = self._cell(role, row).values
        if values is None or values.null_count:
            raise DatasetError(f"row {row}: {self._names[role]} is null or holds a null")
        raw = to_numpy(values)
        narrow = raw.astype(DTYPES[role], copy=False)
        wrong = raw[raw != narrow]
        if len(wrong):
            raise DatasetError(
                f"row {row}: {self._names[role]} holds {wrong[0]}, which is no {DTYPES[role].name}"
            )
        return narrow


def _names_of(columns: Columns) -> dict[str, str]:
    return {
        INPUT_IDS: columns.input_ids,
        LOSS_MASK: columns.loss_mask,
        ROW_ID: columns.row_id,
        ATTENTION_MASK: ATTENTION_MASK,
    }


def _refuse_shared(columns: Columns) -> None:
    roles: dict[str, list[str]] = {}
    for role, name in _names_of(columns).items():
        roles.setdefault(name, []).append(role)
    for name, shared in roles.items():
        if len(shared) > 1:
            raise DatasetError(
                f"column {name!r} can't be read as {' and '.join(shared)} at once: name another one for "
                "one of them, and rename the column if that is its default name"
            )


def _is_valueless(files: Sequence[DataFile], name: str) -> bool:
    """Whether a column has Arrow's type null wherever it is there."""
    schemas = [batch.schema for file in files for batch in file.batches]
    kinds = {schema.field(name).type for schema in schemas if name in schema.names}
    return kinds == {pa.null()}


def _find_columns(files: Sequence[DataFile], columns: Columns) -> dict[str, str]:
    """Role -> name of the columns that are there, after checks of presence, type and sound offsets."""
    asked, default = _names_of(columns), _names_of(Columns())
    for role in (LOSS_MASK, ROW_ID, ATTENTION_MASK):
        if asked[role] == default[role] and _is_valueless(files, asked[role]):
            logger.warning("column %r holds no value at all: read as if it weren't there", asked[role])
            del asked[role]
    found: dict[str, str] = {}
    for file in files:
        required = [
            role for role in asked if role == INPUT_IDS or asked[role] != default[role] or role in found
        ]
        for role in required:
            _require(file, role, asked[role])
        _refuse_unsupported(file)
        there = {role: name for role, name in asked.items() if name in file.column_names}
        if found and there != found:
            extra = ", ".join(there[role] for role in there.keys() - found.keys())
            raise DatasetError(f"{file.name} has the column {extra}, which {files[0].name} has not")
        found = there
        for batch in file.batches:
            _check_batch(file.name, batch, found)
    return found


def _require(file: DataFile, role: str, name: str) -> None:
    if name not in file.column_names:
        option = role.removeprefix("row_").replace("_", "-")
        raise DatasetError(
            f"{file.name} has no column {name!r}; it has {', '.join(file.column_names)}. "
            f"Name the right one with --{option}-column, in Python Columns({role}=...)"
        )


def _refuse_unsupported(file: DataFile) -> None:
    found = [name for name in UNSUPPORTED_COLUMNS if name in file.column_names]
    if found:
        raise DatasetError(
            f"{file.name} has the column {', '.join(found)}, which extraction can't honour: "
            "packed and multimodal rows are refused. If it says nothing of its own, remove it"
        )


def _check_batch(file: str, batch: pa.RecordBatch, names: Mapping[str, str]) -> None:
    for role, name in names.items():
        array = batch.column(name)
        is_right, kind = (
            (is_text, "text or integers") if role == ROW_ID else (is_integer_list, "lists of integers")
        )
        if not is_right(array.type):
            raise DatasetError(
                f"{file}: column {name!r} is {array.type}, but must hold {kind}; write it as such"
            )
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DatasetError(f"{file}: column {name!r} is corrupt: {error}") from error


class _Scanner:
    """Collects a `Scan` slice by slice."""

    def __init__(
        self, names: Mapping[str, str], *, vocab_size: int, max_length: int, too_long: TooLong
    ) -> None:
        self._names = names
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._refuses_long = too_long == "refuse"
        self._parts: list[tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.int32]]] = []
        self._refused: dict[int, str] = {}
        self._num_truncated = 0

    def add(self, first_row: int, part: Mapping[str, Lists]) -> None:
        """Judge the rows of a slice; of several faults of a row the first is told."""
        ids = part[INPUT_IDS]
        num_tokens = np.clip(ids.lengths, 0, self._max_length)
        for row, fault in self._faults(part):
            num_tokens[row] = 0
            self._refused.setdefault(first_row + row, f"row {first_row + row}: {fault}")
        self._num_truncated += int(np.count_nonzero((num_tokens > 0) & (ids.lengths > num_tokens)))
        supervised = _count_supervised(part[LOSS_MASK], num_tokens) if LOSS_MASK in part else num_tokens
        self._parts.append((num_tokens.astype(np.int32), _keys(ids, num_tokens), supervised.astype(np.int32)))

    def finish(self, fingerprint: str) -> Scan:
        """The whole dataset's scan."""
        num_tokens, keys, num_supervised = (
            np.concatenate(arrays) for arrays in zip(*self._parts, strict=True)
        )
        return Scan(
            num_tokens=num_tokens,
            keys=keys,
            num_supervised=num_supervised,
            refused=dict(sorted(self._refused.items())),
            num_truncated=self._num_truncated,
            fingerprint=fingerprint,
        )

    def _faults(self, part: Mapping[str, Lists]) -> Iterator[Fault]:
        ids = part[INPUT_IDS]
        yield from _list_faults(ids, self._names[INPUT_IDS])
        for row in np.flatnonzero(ids.lengths == 0).tolist():
            yield row, f"{self._names[INPUT_IDS]} is empty"
        for row, at, value in ids.first_in_rows(
            np.flatnonzero((ids.values < 0) | (ids.values >= self._vocab_size))
        ):
            yield row, f"token id {value} at position {at} is outside the target's 0..{self._vocab_size - 1}"
        for role in (LOSS_MASK, ATTENTION_MASK):
            if role in part:
                yield from _mask_faults(part[role], self._names[role], ids.lengths)
        if ATTENTION_MASK in part:
            for row, at, _ in part[ATTENTION_MASK].first_in_rows(
                np.flatnonzero(part[ATTENTION_MASK].values == 0)
            ):
                yield row, f"{ATTENTION_MASK} is 0 at position {at}: tokenise without padding"
        if self._refuses_long:
            for row in np.flatnonzero(ids.lengths > self._max_length).tolist():
                yield row, f"{ids.lengths[row]} tokens are more than the maximum of {self._max_length}"


def _list_faults(lists: Lists, name: str) -> Iterator[Fault]:
    for row in np.flatnonzero(lists.lengths < 0).tolist():
        yield row, f"{name} is null"
    for row, at, _ in lists.first_in_rows(lists.nulls):
        yield row, f"{name} holds a null at position {at}"


def _mask_faults(mask: Lists, name: str, num_tokens: NDArray[np.int64]) -> Iterator[Fault]:
    yield from _list_faults(mask, name)
    for row in np.flatnonzero(mask.lengths != num_tokens).tolist():
        yield row, f"{name} has {mask.lengths[row]} values for {num_tokens[row]} tokens"
    for row, at, value in mask.first_in_rows(np.flatnonzero((mask.values != 0) & (mask.values != 1))):
        yield row, f"{name} holds {value} at position {at}, which is neither 0 nor 1"


def _count_supervised(mask: Lists, num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ones among the first `num_tokens` of each row's mask."""
    total: NDArray[np.int64] = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    starts = mask.offsets[:-1]
    supervised: NDArray[np.int64] = total[starts + num_tokens] - total[starts]
    return supervised


def _keys(ids: Lists, num_tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
    """[rows, 16] hashes of the first `num_tokens` ids of each row, zeros where there are none."""
    tokens = np.ascontiguousarray(ids.values.astype("<i4", copy=False)).view(np.uint8).data
    rows = np.flatnonzero(num_tokens)
    starts = (4 * ids.offsets[rows]).tolist()
    ends = (4 * (ids.offsets[rows] + num_tokens[rows])).tolist()
    digests = [extraction_key(tokens[start:end]) for start, end in zip(starts, ends, strict=True)]
    keys = np.zeros((len(num_tokens), KEY_BYTES), np.uint8)
    keys[rows] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, KEY_BYTES)
    return keys
