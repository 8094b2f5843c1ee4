"""Hidden states for trainers: random access to the rows of a version, and shuffled streams of them.

Shapes: T tokens of a row, L layers, H hidden size.
"""

import copy
import operator
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from layertap.cache import DiskCache
from layertap.catalog import Catalog
from layertap.collate import Row, pack
from layertap.epoch import EpochSettings, RowPlaces, Rows
from layertap.errors import CatalogError, MissingRowError
from layertap.join import match
from layertap.rows import StoredRows
from layertap.spec import ExtractionSpec, LastHiddenState
from layertap.store import Store
from layertap.versions import Version, Versions

if TYPE_CHECKING:
    from layertap.stream import Collate, RowStream

THREADS = 16
"""Requests at once."""

CACHE_BYTES = 100 << 30


class HiddenStates(Dataset[Row]):
    """The stored rows of a dataset, in its order: a map-style dataset for `torch.utils.data.DataLoader`.

    On S3 a row is one range request, and neighbours that are asked for together are one; on a folder they are
    mapped into memory, privately: writing to a tensor changes neither the file nor what is read next. Each
    row is checked against its CRC64NVME and its tokens, and fetched once more if it fails.

    Rows differ in length, so a DataLoader needs `batch_size=None` or a `collate_fn`, such as
    `layertap.collate.pack`. Workers may be of any start method; Python itself may hang where a process with
    busy threads forks, so take `forkserver` there. For training, `stream` shuffles and reads faster.

    Args:
        store: the root: a path, `s3://bucket/prefix`, or a Store.
        version: which version; by default the newest complete one.
        join: a second root of the same target with other layers, or its HiddenStates. A row then has the
            layers of both; a row that one of them lacks is missing.
        cache_dir: a folder on a local disk where rows of a remote store are kept for the next epoch.
        cache_bytes: the most that lies in it. Processes of a host may share it.

    Raises:
        CatalogError: no extraction there, no such version, or one of another extraction.
        SpecMismatchError: the joined root is of another target or dtype.
        FormatError: written by a newer major format than this layertap reads.
        InputError: `cache_bytes` is no positive integer.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        version: int | None = None,
        join: "HiddenStates | Store | str | Path | None" = None,
        cache_dir: str | Path | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if join is not None and not isinstance(join, HiddenStates):
            join = HiddenStates(join, cache_dir=cache_dir, cache_bytes=cache_bytes)
        store = store if isinstance(store, Store) else Store.open(store)
        spec = Catalog(store).root().spec
        cache = _open_cache(store, spec, cache_dir, cache_bytes)
        self._join = join
        self._load(StoredRows(store, _choose(store, version), cache))

    def _load(self, rows: StoredRows) -> None:
        self._parts = [rows]
        self._missing = rows.missing
        if self._join is not None:
            self._match(rows, self._join)
        self.num_tokens = rows.places.num_tokens

    num_tokens: NDArray[np.int32]
    """[len(self)] tokens of each row, for samplers that go by length."""

    def _match(self, mine: StoredRows, join: "HiddenStates") -> None:
        """Keep the rows that the other root has too; the others are missing."""
        theirs = join._parts[0]
        their_missing = join._missing if join._join else theirs.missing_here
        both, places, self._missing = match(mine, theirs, their_missing)
        mine.take(both)
        for part in join._parts:
            self._parts.append(copy.copy(part))
            self._parts[-1].take(places)

    @property
    def missing(self) -> pa.Table:
        """`row` of the dataset and `reason` of each row that isn't stored; in a join with the root's name."""
        return self._missing.select(["row", "reason"])

    @property
    def store(self) -> Store:
        """The root."""
        return self._parts[0].store

    @property
    def version(self) -> Version:
        """The version that is read."""
        return self._parts[0].version

    @property
    def content(self) -> str:
        """What tells these rows from others: the version's `content`, and the joined one's."""
        return "+".join(part.version.content for part in self._parts)

    @property
    def spec(self) -> ExtractionSpec:
        """What the root holds; of a joined one, `layer_ids` and `last_hidden_state` know."""
        return self._parts[0].spec

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The L layers of `hidden_states`, ascending: id k is the output of decoder layer k, from 0."""
        return tuple(sorted({k for part in self._parts for k in part.spec.layer_ids}))

    @property
    def last_hidden_state(self) -> LastHiddenState:
        """Whether `last_hidden_state` is before the final norm, after it, or not stored."""
        part = self._part_with_last
        return part.spec.last_hidden_state if part else "none"

    @property
    def hidden_size(self) -> int:
        """H, the width of the target's hidden states."""
        return self._parts[0].hidden_size

    @property
    def places(self) -> RowPlaces:
        """Where each row lies in the root, and its tokens."""
        return self._parts[0].places

    @property
    def rows(self) -> Rows:
        """[len(self)] the number in the dataset of each row, ascending."""
        return self._parts[0].numbers

    @property
    def _part_with_last(self) -> StoredRows | None:
        return next((part for part in self._parts if part.spec.stores_last), None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
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
        i = self._checked(i)
        return self._row(i, [part.read(i) for part in self._parts])

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Several rows, read at once and neighbours together; what a DataLoader calls for a batch."""
        with ThreadPoolExecutor(THREADS) as pool:
            return [read() for read in self.submit(indices, pool)]

    def submit(self, indices: Sequence[int], pool: Executor) -> list[Callable[[], Row]]:
        """Start to read rows, neighbours together.

        Args:
            indices: which, as for `states[i]`.
            pool: its threads read.

        Returns:
            For each row a function that waits for it and raises what `states[i]` does.
        """
        wanted = [self._checked(i) for i in indices]
        reads = zip(*(part.submit(wanted, pool) for part in self._parts), strict=True)
        return [_later(self._row, i, parts) for i, parts in zip(wanted, reads, strict=True)]

    def index_of(self, row: int) -> int:
        """Where a row of the dataset is among the stored ones.

        Raises:
            MissingRowError: it isn't stored; says why.
            IndexError: the dataset has no such row.
        """
        i = int(np.searchsorted(self.rows, row))
        if i < len(self) and self.rows[i] == row:
            return i
        missing: list[Any] = self.missing["row"].to_pylist()
        if row not in missing:
            raise IndexError(f"row {row} of a dataset of {self.version.num_rows} rows")
        reason = self.missing["reason"][missing.index(row)]
        where = "missing in the join" if self._join else f"not stored in {self.store.uri}"
        raise MissingRowError(f"row {row} is {where}: {reason}")

    def stream(
        self,
        *,
        seed: int | None = 0,
        batch_size: int | None = None,
        max_batch_tokens: int | None = None,
        group_by_length: bool = True,
        collate: "Collate" = pack,
        drop_last: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
        window_bytes: int = EpochSettings.window_bytes,
        num_threads: int = THREADS,
    ) -> "RowStream":
        """The rows shuffled and batched, for training: see `layertap.stream.RowStream`.

        Without `batch_size` and `max_batch_tokens` it yields rows, otherwise what `collate` makes of them.

        Args:
            seed: of the shuffle; None leaves the rows in the order in which they lie in the store.
            batch_size: rows of a batch.
            max_batch_tokens: tokens of a batch instead.
            group_by_length: with `max_batch_tokens`, whether rows of a batch have about one length and rows
                times the longest stay within it, or rows of any length meet and their sum does.
            collate: a list of rows to a batch: `layertap.collate.pack`, `pad`, or your own.
            drop_last: leave out an incomplete last batch, and the last batches with which only some ranks
                would take one more step.
            rank: this process among those that share the rows; by default as `torch.distributed` says.
            num_ranks: how many share them.
            window_bytes: rows that are shuffled among each other; up to two windows are held in memory.
            num_threads: requests at once.

        Raises:
            InputError: a number is out of its range, or `torch.distributed` isn't initialised under torchrun.
        """
        from layertap.stream import RowStream, rank_of_process

        settings = EpochSettings(
            seed=seed,
            batch_size=batch_size,
            max_batch_tokens=max_batch_tokens,
            group_by_length=group_by_length,
            window_bytes=window_bytes,
            drop_last=drop_last,
        )
        rank, num_ranks = rank_of_process(rank, num_ranks)
        return RowStream(self, settings, collate, rank=rank, num_ranks=num_ranks, num_threads=num_threads)

    def _checked(self, i: Any) -> int:
        try:
            number = operator.index(i)
        except TypeError:
            raise TypeError(
                f"a stored row is read by its number, not by {i!r}; for several, take torch.utils.data.Subset"
            ) from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)} stored rows")
        return number % len(self)

    def _row(self, i: int, data: Sequence[Tensor]) -> Row:
        parts = [part.tensors(i, bytes_) for part, bytes_ in zip(self._parts, data, strict=True)]
        row: Row = {**parts[0], "loss_mask": self._parts[0].loss_mask(i), "row": int(self.rows[i])}
        if len(parts) > 1:
            joined = torch.cat([part["hidden_states"] for part in parts], dim=1)
            ids = [k for part in self._parts for k in part.spec.layer_ids]
            row["hidden_states"] = joined[:, [ids.index(k) for k in self.layer_ids]]
            row |= next(({"last_hidden_state": p["last_hidden_state"]} for p in parts if len(p) == 3), {})
        return row

    def __getstate__(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "version": self.version,
            "cache": self._parts[0].cache,
            "join": self._join,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._join = state["join"]
        self._load(StoredRows(state["store"], state["version"], state["cache"]))


def _later(make: Callable[[int, Sequence[Tensor]], Row], i: int, parts: Any) -> Callable[[], Row]:
    return lambda: make(i, [read() for read in parts])


def _open_cache(
    store: Store, spec: ExtractionSpec, folder: str | Path | None, max_bytes: int
) -> DiskCache | None:
    if folder is not None and store.local_path("layertap.json") is None:
        return DiskCache(folder, group=spec.fingerprint, max_bytes=max_bytes)
    if folder is not None:
        warnings.warn(f"cache_dir is of no use: {store.uri} is a folder itself", stacklevel=3)
    return None


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
