"""Columns of a dataset as numpy arrays and as a hash, the same for every list type, width and chunking."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


def is_integer_list(kind: Any) -> bool:
    """Whether a type is a list of integers or bools, whichever kind of list."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    if not any(test(kind) for test in tests):
        return False
    return pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)


def is_text(kind: Any) -> bool:
    """Whether a type is text or integers, which stand for their digits; dictionary-encoded or not."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def to_numpy(values: Any) -> NDArray[Any]:
    """An integer array without nulls as it lies in memory; bools as uint8."""
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    array: NDArray[Any] = values.to_numpy(zero_copy_only=True)
    return array


@dataclass(frozen=True)
class Lists:
    """Consecutive rows of one column."""

    lengths: NDArray[np.int64]
    """[rows], -1 where the row is null."""

    values: NDArray[Any]
    """All rows' values end to end in the integer type they have in the file; 0 where one is null."""

    nulls: NDArray[np.int64]
    """Ascending positions in `values` that are null."""

    @classmethod
    def of(cls, array: Any) -> "Lists":
        """From an Arrow array of lists; views it, unless it holds nulls or bools."""
        lengths = pc.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
        flat = array.flatten()  # of this slice only, and without what null rows hide
        nulls = np.empty(0, np.int64)
        if flat.null_count:
            nulls = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))
            flat = flat.fill_null(0)
        return cls(lengths.astype(np.int64), to_numpy(flat), nulls)

    @classmethod
    def of_text(cls, array: Any) -> "Lists":
        """From an Arrow array of text or integers, as the bytes of its UTF-8."""
        texts = [
            None if text is None else text.encode() for text in array.cast(pa.large_string()).to_pylist()
        ]
        lengths = np.array([-1 if text is None else len(text) for text in texts], np.int64)
        values = np.frombuffer(b"".join(filter(None, texts)), np.uint8)
        return cls(lengths, values, np.empty(0, np.int64))

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """[rows + 1] where each row's values begin."""
        return np.concatenate([[0], np.cumsum(np.maximum(self.lengths, 0))])

    def first_in_rows(self, positions: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """(row, position in the row, value) of the first of ascending `positions` in each row with any."""
        rows, firsts = np.unique(np.searchsorted(self.offsets, positions, "right") - 1, return_index=True)
        for row, position in zip(rows.tolist(), positions[firsts].tolist(), strict=True):
            yield row, position - int(self.offsets[row]), int(self.values[position])


class Digest:
    """Streaming hash of columns; `dtypes` gives each one the width in which its values are hashed."""

    def __init__(self, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self._columns = {name: _ColumnDigest(dtype) for name, dtype in dtypes.items()}

    def update(self, part: Mapping[str, Lists]) -> None:
        """Take the next rows."""
        for name, column in self._columns.items():
            column.update(part[name])

    def hexdigest(self) -> str:
        """32 hex digits over all rows so far."""
        text = ";".join(f"{name}={column.hexdigest()}" for name, column in sorted(self._columns.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _ColumnDigest:
    """Lengths, values and oddities are hashed apart, so that none depends on where slices end."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._lengths, self._values, self._oddities = (hashlib.blake2b() for _ in range(3))
        self._num_values = 0

    def update(self, lists: Lists) -> None:
        narrow = np.ascontiguousarray(lists.values.astype(self._dtype, copy=False))
        self._lengths.update(lists.lengths.astype("<i8").data)
        self._values.update(narrow.data)
        for position, value in _oddities(lists, narrow):
            self._oddities.update(f"{self._num_values + position}:{value};".encode())
        self._num_values += len(narrow)

    def hexdigest(self) -> str:
        return "-".join(part.hexdigest() for part in (self._lengths, self._values, self._oddities))


def _oddities(lists: Lists, narrow: NDArray[Any]) -> list[tuple[int, str]]:
    """Positions and true values of what `narrow` can't tell: nulls, and integers beyond its dtype."""
    odd: dict[int, str] = {}
    if not np.can_cast(lists.values.dtype, narrow.dtype):
        odd = {int(i): str(lists.values[i]) for i in np.flatnonzero(lists.values != narrow)}
    odd |= {int(i): "null" for i in lists.nulls}
    return sorted(odd.items())
