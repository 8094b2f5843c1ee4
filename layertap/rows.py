"""The stored rows of one version of one root: where each lies, and its bytes, checked."""

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.cache import DiskCache
from layertap.catalog import Catalog
from layertap.epoch import RowPlaces, Rows
from layertap.errors import CatalogError, IntegrityError, NotFoundError
from layertap.folder import read_range
from layertap.keys import extraction_key, find_keys, keys_of, sortable
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
"""A mapped range takes a file descriptor as long as the program holds it; beyond so many they are copied."""

MAX_GAP_BYTES = 128 << 10
"""Rows of a file with no more between them are read by one request."""

MAX_SPAN_BYTES = 32 << 20
"""Neighbours are read by one request up to so much."""

_live_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

Read = Callable[[], Tensor]


class StoredRows:
    """The rows of a version that are stored, in the dataset's order.

    Args:
        store: the root.
        version: one of its versions.
        cache: where rows of a remote store are kept.

    Raises:
        CatalogError: the version is of another extraction than the root.
    """

    def __init__(self, store: Store, version: Version, cache: DiskCache | None) -> None:
        self.store = store
        root = Catalog(store).root()
        self.spec = root.spec
        self.version = version
        self.cache = cache
        if version.spec_fingerprint != self.spec.fingerprint:
            raise CatalogError(
                f"version {version.number} of {store.uri} is of another extraction (spec "
                f"{version.spec_fingerprint}) than its layertap.json (spec {self.spec.fingerprint}): "
                "read another version, or restore the layertap.json it was made for"
            )
        self.hidden_size: int = root.target["hidden_size"]
        table = Versions(store).rows(version, COLUMNS)
        self._masks, table = table["loss_mask"], table.drop_columns("loss_mask")
        is_missing = table["reason"].is_valid()
        missing = table.filter(is_missing)
        stored = table.filter(is_missing.to_numpy() == 0)
        self.missing: pa.Table = missing.select(["index", "extraction_key", "reason"]).rename_columns(
            ["row", "extraction_key", "reason"]
        )
        file: Any = stored["file"].unify_dictionaries().combine_chunks()
        self._files: list[str] = file.dictionary.to_pylist()
        self.keys = keys_of(stored["extraction_key"].combine_chunks())
        self.numbers: Rows = stored["index"].to_numpy()
        self._crc64nvme: NDArray[np.uint64] = stored["crc64nvme"].to_numpy()
        self.places = RowPlaces(
            file=file.indices.to_numpy(),
            offset=stored["offset"].to_numpy(),
            nbytes=stored["nbytes"].to_numpy(),
            num_tokens=stored["num_tokens"].to_numpy(),
        )

    def take(self, rows: Rows) -> None:
        """Keep these rows alone, in this order."""
        self.keys, self.numbers, self._crc64nvme = self.keys[rows], self.numbers[rows], self._crc64nvme[rows]
        self.places = RowPlaces(**{f.name: getattr(self.places, f.name)[rows] for f in fields(RowPlaces)})

    def find(self, keys: NDArray[np.uint8]) -> Rows:
        """Which row has each of these extraction keys [n, 16]; -1 where none has."""
        in_order = np.argsort(sortable(self.keys), kind="stable")
        return np.append(in_order, -1)[find_keys(self.keys[in_order], keys)]

    @property
    def missing_here(self) -> pa.Table:
        """The missing rows, with the root's name in each reason."""
        told = [self.lacks(str(reason)) for reason in self.missing["reason"].to_pylist()]
        return self.missing.set_column(2, "reason", pa.array(told, pa.string()))

    def lacks(self, reason: str) -> str:
        """Why a row is missing, with the name of the root."""
        return f"not in version {self.version.number} of {self.store.uri}: {reason}"

    def tensors(self, i: int, data: Tensor) -> dict[str, Tensor]:
        """Views of a row's bytes: `input_ids` [T], `hidden_states` [T, L, H], `last_hidden_state` [T, H]."""
        num_tokens, num_layers, hidden = (
            int(self.places.num_tokens[i]),
            len(self.spec.layer_ids),
            self.hidden_size,
        )
        states = data[: -4 * num_tokens].view(getattr(torch, self.spec.dtype))
        layers_end = num_tokens * num_layers * hidden
        tensors = {
            "input_ids": data[-4 * num_tokens :].view(torch.int32),
            "hidden_states": states[:layers_end].view(num_tokens, num_layers, hidden),
        }
        if self.spec.stores_last:
            tensors["last_hidden_state"] = states[layers_end:].view(num_tokens, hidden)
        return tensors

    def loss_mask(self, i: int) -> Tensor:
        """uint8 [T]; ones in a dataset without masks."""
        mask = self._masks[int(self.numbers[i])].values
        if mask is None:
            return torch.ones(int(self.places.num_tokens[i]), dtype=torch.uint8)
        return torch.from_numpy(mask.to_numpy().copy())

    def read(self, i: int) -> Tensor:
        """The bytes of a row.

        Raises:
            IntegrityError: they are damaged, twice; names file, offset and row.
        """
        return (self._from_cache(i) or self._read_span([i]))[0]

    def submit(self, rows: Sequence[int], pool: Executor) -> list[Read]:
        """Start to read rows, neighbours together; returns for each what waits for its bytes."""
        reads: dict[int, Read] = {}
        wanted = sorted(range(len(rows)), key=lambda k: self._place(rows[k]))
        if self.cache is not None:
            kept = [k for k in wanted if self.cache.find(self._name(rows[k]))]
            reads.update((k, _waiting(pool.submit(self._read_kept, rows[k]), 0)) for k in kept)
            wanted = [k for k in wanted if k not in reads]
        for span in self._spans(wanted, rows):
            future = pool.submit(self._read_span, [rows[k] for k in span])
            reads.update((k, _waiting(future, j)) for j, k in enumerate(span))
        return [reads[k] for k in range(len(rows))]

    def _place(self, i: int) -> tuple[int, int]:
        return int(self.places.file[i]), int(self.places.offset[i])

    def _spans(self, wanted: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
        """Runs of neighbours among `wanted`, which count in `rows` and are sorted by place."""
        spans: list[list[int]] = []
        file = begin = end = -1
        for k in wanted:
            its_file, offset = self._place(rows[k])
            its_end = offset + int(self.places.nbytes[rows[k]])
            if its_file != file or offset > end + MAX_GAP_BYTES or its_end > max(end, begin + MAX_SPAN_BYTES):
                spans.append([])
                file, begin = its_file, offset
            spans[-1].append(k)
            end = its_end
        return spans

    def _read_span(self, rows: Sequence[int]) -> list[Tensor]:
        """The bytes of rows of one file, sorted by place, in one request."""
        path, begin = self._files[self.places.file[rows[0]]], int(self.places.offset[rows[0]])
        end = int(self.places.offset[rows[-1]] + self.places.nbytes[rows[-1]])
        data = self._load(path, begin, end - begin)
        found: list[Tensor] = []
        for j, i in enumerate(rows):
            offset = int(self.places.offset[i]) - begin
            row = data[offset : offset + int(self.places.nbytes[i])]
            if self._damage(i, row):
                row = self._read_again(i)
            elif self.cache is not None:
                self.cache.put(self._name(i), row.numpy().data)
            is_shared = j > 0 and self._place(i) == self._place(rows[j - 1])
            found.append(row.clone() if is_shared else row)
        return found

    def _read_again(self, i: int) -> Tensor:
        path, offset, nbytes = (
            self._files[self.places.file[i]],
            int(self.places.offset[i]),
            int(self.places.nbytes[i]),
        )
        data = self._load(path, offset, nbytes)
        if damage := self._damage(i, data):
            raise IntegrityError(
                f"{self.store.uri}/{path} is damaged: the {nbytes} bytes from {offset} {damage} row "
                f"{self.numbers[i]}"
            )
        return data

    def _read_kept(self, i: int) -> list[Tensor]:
        return self._from_cache(i) or self._read_span([i])

    def _from_cache(self, i: int) -> list[Tensor] | None:
        """The row as the cache has it; a file there that is damaged or cut off is forgotten."""
        path = self.cache.find(self._name(i)) if self.cache else None
        if path is None or self.cache is None:
            return None
        try:
            data = _load_file(path, 0, int(self.places.nbytes[i]))
            damage = self._damage(i, data)
        except FileNotFoundError:
            return None
        except IntegrityError as error:
            damage = str(error)
        if damage:
            self.cache.drop(self._name(i))
            return None
        return [data]

    def _name(self, i: int) -> str:
        return f"{self.keys[i].tobytes().hex()}-{self._crc64nvme[i]:016x}"

    def _damage(self, i: int, data: Tensor) -> str | None:
        """Whether the bytes aren't those that were stored, or are another row's."""
        found = crc64nvme(data.numpy().data)  # first: hashing a few ids would wait for the disk with the GIL
        ids = data[-4 * int(self.places.num_tokens[i]) :].numpy()
        if extraction_key(ids.data) != self.keys[i].tobytes():
            return "don't end with the token ids of"
        return None if found == self._crc64nvme[i] else "don't have the CRC64NVME of"

    def _load(self, path: str, offset: int, nbytes: int) -> Tensor:
        local = self.store.local_path(path)
        if local is None:
            return _copied(self.store.get_range(path, offset, nbytes))
        try:
            return _load_file(local, offset, nbytes)
        except FileNotFoundError as error:
            number = self.version.number
            raise NotFoundError(f"{local} is gone, though version {number} names it") from error


def _waiting(future: Any, j: int) -> Read:
    return lambda: future.result()[j]


def _copied(data: Any) -> Tensor:
    """Bytes in memory that may be written to; numpy copies without the GIL."""
    return torch.from_numpy(np.array(np.frombuffer(data, np.uint8)))


def _load_file(path: Path, offset: int, nbytes: int) -> Tensor:
    """Bytes of a file, mapped copy-on-write: written to, they differ for this tensor alone."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < offset + nbytes:
            raise IntegrityError(f"{path} is cut off at {size} bytes")
        if len(_live_maps) >= MAX_LIVE_MAPS:
            return _copied(read_range(file, offset, nbytes))
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        # read ahead as one, not page after page; `mmap.madvise` would hold the GIL meanwhile
        os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)
        mapped = mmap.mmap(file.fileno(), offset + nbytes - start, access=mmap.ACCESS_COPY, offset=start)
    _live_maps.add(mapped)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - start)
