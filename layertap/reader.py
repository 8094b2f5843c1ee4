"""Hidden states for trainers: random access to the rows of a version.

Shapes: T tokens of a row, L layers, H hidden size.
"""

import hashlib
import mmap
import operator
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from layertap.catalog import Catalog
from layertap.errors import CatalogError, IntegrityError, NotFoundError
from layertap.records import keys_of
from layertap.store import Store, crc64nvme
from layertap.versions import Version, Versions

COLUMNS = [
    "index",
    "extraction_key",
    "loss_mask",
    "num_tokens",
    "file",
    "offset",
    "nbytes",
    "crc64nvme",
    "reason",
]

MAX_LIVE_MAPS = 256
"""A mapped row takes a file descriptor as long as the program holds it; beyond so many, rows are copied."""

_live_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class HiddenStates(Dataset[dict[str, Any]]):
    """The stored rows of a dataset, in its order: a map-style dataset for `torch.utils.data.DataLoader`.

    On S3 a row is one range request; on a folder it is mapped into memory, privately: writing to a tensor
    changes neither the file nor what is read next. Rows differ in length, so a DataLoader needs
    `batch_size=None` or a `collate_fn`. Workers may be spawned or forked; Python itself may hang
    where a process with busy threads forks, so spawn them there.

    Args:
        store: the root: a path, `s3://bucket/prefix`, or a Store.
        version: which version; by default the newest complete one.

    Raises:
        CatalogError: no extraction there, no such version, or one of another extraction.
        FormatError: written by a newer major format than this layertap reads.
    """

    def __init__(self, store: Store | str | Path, *, version: int | None = None) -> None:
        self.store = store if isinstance(store, Store) else Store.open(store)
        self.spec = Catalog(self.store).root().spec
        self.version = _choose(self.store, version)
        if self.version.spec_fingerprint != self.spec.fingerprint:
            raise CatalogError(
                f"version {self.version.number} of {self.store.uri} is of another extraction (spec "
                f"{self.version.spec_fingerprint}) than its layertap.json (spec {self.spec.fingerprint}): "
                "read another version, or restore the layertap.json it was made for"
            )
        self._load()

    def _load(self) -> None:
        table = Versions(self.store).rows(self.version, COLUMNS)
        is_missing = table["reason"].is_valid()
        missing = table.filter(is_missing)
        self.missing = pa.table({"row": missing["index"], "reason": missing["reason"]})
        stored = table.filter(is_missing.to_numpy() == 0)
        file: Any = stored["file"].unify_dictionaries().combine_chunks()
        self._files: list[str] = file.dictionary.to_pylist()
        self._file: NDArray[np.int32] = file.indices.to_numpy()
        self._keys = keys_of(stored["extraction_key"].combine_chunks())
        self._masks = stored["loss_mask"]
        self._rows: NDArray[np.int64] = stored["index"].to_numpy()
        self._offset: NDArray[np.int64] = stored["offset"].to_numpy()
        self._nbytes: NDArray[np.int64] = stored["nbytes"].to_numpy()
        self._crc64nvme: NDArray[np.uint64] = stored["crc64nvme"].to_numpy()
        self.num_tokens: NDArray[np.int32] = stored["num_tokens"].to_numpy()
        """[len(self)] tokens of each row, for samplers that go by length."""

    missing: pa.Table
    """`row` of the dataset and `reason`, for each row that isn't stored."""

    @property
    def hidden_size(self) -> int:
        """H, the width of the target's hidden states."""
        bytes_per_token = int(self._nbytes[0]) // int(self.num_tokens[0])
        return (bytes_per_token - 4) // (self.spec.num_states * self.spec.item_bytes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """The i-th stored row.

        Returns:
            `input_ids` int32 [T]; `loss_mask` uint8 [T], ones in a dataset without; in the spec's dtype
            `hidden_states` [T, L, H] and, if stored, `last_hidden_state` [T, H]; `row`, its number in the
            dataset.

        Raises:
            IndexError: there is no i-th one.
            IntegrityError: the bytes are damaged, twice; names file, offset and row.
            TypeError: `i` is no integer.
        """
        i = _index(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)} stored rows")
        i %= len(self)
        data = self._read_checked(i)
        num_tokens, num_layers, hidden = int(self.num_tokens[i]), len(self.spec.layer_ids), self.hidden_size
        states = data[: -4 * num_tokens].view(getattr(torch, self.spec.dtype))
        layers_end = num_tokens * num_layers * hidden
        row = {
            "input_ids": data[-4 * num_tokens :].view(torch.int32),
            "loss_mask": self._loss_mask(i),
            "hidden_states": states[:layers_end].view(num_tokens, num_layers, hidden),
            "row": int(self._rows[i]),
        }
        if self.spec.stores_last:
            row["last_hidden_state"] = states[layers_end:].view(num_tokens, hidden)
        return row

    def _loss_mask(self, i: int) -> Tensor:
        mask = self._masks[i].values
        if mask is None:
            return torch.ones(int(self.num_tokens[i]), dtype=torch.uint8)
        return torch.from_numpy(mask.to_numpy().copy())

    def _read_checked(self, i: int) -> Tensor:
        """The row's bytes, read again once if they are damaged."""
        path, row = self._files[self._file[i]], self._rows[i]
        offset, nbytes = int(self._offset[i]), int(self._nbytes[i])
        for _ in range(2):
            data = self._read(path, offset, nbytes)
            damage = self._damage(i, data.numpy())
            if damage is None:
                return data
        raise IntegrityError(
            f"{self.store.uri}/{path} is damaged: the {nbytes} bytes from {offset} {damage} row {row}"
        )

    def _damage(self, i: int, data: NDArray[np.uint8]) -> str | None:
        """Whether the bytes aren't those that were stored, or are another row's."""
        ids = data[-4 * int(self.num_tokens[i]) :]
        if hashlib.blake2b(ids.data, digest_size=16).digest() != self._keys[i].tobytes():
            return "don't end with the token ids of"
        if crc64nvme(data.data) != self._crc64nvme[i]:
            return "don't have the CRC64NVME of"
        return None

    def _read(self, path: str, offset: int, nbytes: int) -> Tensor:
        local = self.store.local_path(path)
        if local is None or len(_live_maps) >= MAX_LIVE_MAPS:
            return torch.frombuffer(bytearray(self.store.get_range(path, offset, nbytes)), dtype=torch.uint8)
        try:
            return _map(local, offset, nbytes)
        except FileNotFoundError as error:
            raise NotFoundError(f"{local} is gone, though version {self.version.number} names it") from error

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "spec": self.spec, "version": self.version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()


def _choose(store: Store, number: int | None) -> Version:
    versions = Versions(store)
    if number is not None:
        return versions.get(number)
    version = versions.latest()
    if version is None:
        there = versions.numbers()
        hint = f"the incomplete version {there[-1]} can be asked for" if there else "no run has published yet"
        raise CatalogError(f"{store.uri} has no complete version; {hint}")
    return version


def _index(i: Any) -> int:
    try:
        return operator.index(i)
    except TypeError:
        raise TypeError(
            f"a stored row is read by its number, not by {i!r}; for several, take torch.utils.data.Subset"
        ) from None


def _map(path: Path, offset: int, nbytes: int) -> Tensor:
    """Bytes of a file, mapped copy-on-write: written to, they differ for this tensor alone."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < offset + nbytes:
            raise IntegrityError(f"{path} is cut off at {size} bytes")
        mapped = mmap.mmap(file.fileno(), offset + nbytes - start, access=mmap.ACCESS_COPY, offset=start)
    _live_maps.add(mapped)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - start)
