"""Pure planning of an epoch: the order of its rows, their batches, and who reads which.

Reading at the store's speed wants neighbours, training wants rows far apart. So the rows of an epoch are cut
where they lie into *chunks* of neighbours, a few MiB each; the chunks are shuffled and gathered into
*windows*; inside a window rows are shuffled freely, and batches are cut. A batch file holds rows of nearly
one length, and a window chunks of many files. A row larger than a chunk is a chunk of its own: such rows are
shuffled over the whole dataset.

Each of the ranks times workers owns every so-manieth window, so that its reads don't overlap another's.
Batches then stand in one sequence, step by step and in a step rank by rank: rank r of R takes every R-th
batch from the r-th on, and of these worker w of W every W-th from the w-th on, which is the order in which a
DataLoader asks its workers. The place in an epoch is therefore one number, and what is left of the epoch
can be planned anew for other numbers of ranks and workers.

Everything follows from the seed, the epoch and the version's places: any process finds the same plan alone.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.errors import InputError

CHUNK_BYTES = 16 << 20
"""Neighbours that are read together; a larger row is read alone."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EpochSettings:
    """How an epoch is shuffled and cut.

    Raises:
        InputError: a number is out of its range or of another type, or both kinds of batches are asked for.
    """

    seed: int | None = 0
    """None leaves the rows in the order in which they lie in the store."""

    batch_size: int | None = None
    """Rows of a batch; only the last of an epoch has fewer, and those that give the ranks equal steps."""

    max_batch_tokens: int | None = None
    """Tokens of a batch; a longer row is a batch of its own."""

    group_by_length: bool = True
    """With `max_batch_tokens`: rows of a batch have about one length, and it is rows times the longest that
    stays within. Otherwise rows of any length meet, and the sum of their tokens stays within: for packing."""

    window_bytes: int = 512 << 20
    """Rows that are shuffled among each other, in bytes of the store. A reader holds up to two windows, and
    while requests are under way some of their bytes twice."""

    drop_last: bool = False
    """Leave out the batches with which only some of the ranks would take one more step, and an incomplete
    last one. Otherwise no row is left out: batches are halved to give each rank as many."""

    def __post_init__(self) -> None:
        for name in ("seed", "batch_size", "max_batch_tokens", "window_bytes"):
            value, least = getattr(self, name), 0 if name == "seed" else 1
            if value is None and name != "window_bytes":
                continue
            if type(value) is not int or value < least:
                raise InputError(f"{name} is {value!r}; it must be an integer of at least {least}")
        if self.batch_size and self.max_batch_tokens:
            raise InputError("batch_size counts rows, max_batch_tokens tokens: give one of them")

    @property
    def is_batched(self) -> bool:
        """Whether batches are made, and not rows alone."""
        return bool(self.batch_size or self.max_batch_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """One phrase for each field in which another stream's settings differ."""
        return [
            f"{f.name}: {getattr(self, f.name)!r} here, {other.get(f.name)!r} there"
            for f in fields(self)
            if getattr(self, f.name) != other.get(f.name)
        ]


@dataclass(frozen=True, kw_only=True)
class RowPlaces:
    """Where rows lie and how long they are; the i-th element of each is of row i."""

    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    num_tokens: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of an epoch that was read by one number of ranks and workers."""

    num_ranks: int
    num_workers: int
    """Of each rank; a rank that reads by itself counts as one."""

    num_steps: int
    """Batches that each rank has taken."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that are delivered together."""

    rows: Rows
    window: int
    """Where most of its neighbours are read; numbers are of one plan."""


def remaining_batches(
    places: RowPlaces, settings: EpochSettings, *, epoch: int, segments: tuple[Segment, ...]
) -> list[Batch]:
    """The batches of an epoch in their sequence, for the ranks and workers of its last segment.

    What earlier segments took is left out; the last segment's own steps aren't.
    """
    rows = np.arange(len(places), dtype=np.int64)
    batches: list[Batch] = []
    for k, segment in enumerate(segments):
        batches = _plan(rows, places, settings, [epoch, k], segment.num_ranks, segment.num_workers)
        taken = batches[: segment.num_steps * segment.num_ranks]
        if k + 1 < len(segments):
            is_left = np.zeros(len(places), bool)
            is_left[rows] = True
            is_left[np.concatenate([np.empty(0, np.int64), *(b.rows for b in taken)])] = False
            rows = np.flatnonzero(is_left)
    return batches


def _plan(
    rows: Rows,
    places: RowPlaces,
    settings: EpochSettings,
    numbers: list[int],
    num_ranks: int,
    num_workers: int,
) -> list[Batch]:
    """All batches of these rows, in the order in which ranks and workers take them."""
    random = None if settings.seed is None else np.random.default_rng([settings.seed, *numbers])
    order, window = _shuffled(rows, places, settings, random)
    num_readers = num_ranks * num_workers
    steps: list[tuple[int, Batch]] = []
    rests: list[Rows] = []
    for reader in range(min(num_readers, int(window[-1]) + 1 if len(window) else 0)):
        mine = window % num_readers == reader
        batches, rest = _cut(order[mine], window[mine], places.num_tokens, settings, random)
        rank, worker = reader % num_ranks, reader // num_ranks
        steps += [((i * num_workers + worker) * num_ranks + rank, b) for i, b in enumerate(batches)]
        rests.append(rest)
    sequence = [batch for _, batch in sorted(steps, key=lambda step: step[0])]
    sequence += _cut_rests(rests, int(window[-1]) + 1 if len(window) else 0, settings)
    return _with_equal_steps(sequence, settings, num_ranks)


def _shuffled(
    rows: Rows, places: RowPlaces, settings: EpochSettings, random: np.random.Generator | None
) -> tuple[Rows, NDArray[np.int64]]:
    """[n] rows window by window, and [n] the window of each."""
    file, offset = places.file[rows], places.offset[rows]
    lying = np.lexsort((offset, file))
    rows, file, offset = rows[lying], file[lying], offset[lying]
    if random is not None:  # other neighbours in each epoch
        offset = offset + random.integers(0, CHUNK_BYTES, int(file.max(initial=0)) + 1)[file]
    chunk = np.cumsum(_changes(file) | _changes(offset // CHUNK_BYTES), dtype=np.int64)
    if random is not None:
        chunk = random.permutation(int(chunk.max(initial=-1)) + 1)[chunk]
        by_chunk = np.argsort(chunk, kind="stable")
        rows, chunk = rows[by_chunk], chunk[by_chunk]
    nbytes = places.nbytes[rows]
    is_first = _changes(chunk)
    starts = np.where(is_first, np.cumsum(nbytes) - nbytes, 0)
    window = np.cumsum(_changes(np.maximum.accumulate(starts) // settings.window_bytes), dtype=np.int64)
    if random is not None:
        rows = rows[np.lexsort((random.random(len(rows)), window))]
    return rows, window


def _changes(values: NDArray[Any]) -> NDArray[np.bool_]:
    """[n] whether an element differs from the one before it; False for the first."""
    return np.concatenate([np.zeros(min(1, len(values)), bool), values[1:] != values[:-1]])


def _cut(
    rows: Rows,
    window: NDArray[np.int64],
    num_tokens: NDArray[np.int32],
    settings: EpochSettings,
    random: np.random.Generator | None,
) -> tuple[list[Batch], Rows]:
    """Batches of a reader's rows, and the rows left over from a last one that isn't full."""
    if settings.max_batch_tokens and settings.group_by_length:
        batches = [
            batch
            for part in _parts(window)
            for batch in _grouped(
                rows[part], int(window[part.start]), num_tokens, settings.max_batch_tokens, random
            )
        ]
        return batches, rows[:0]
    size = settings.batch_size or 1
    if settings.max_batch_tokens:
        ends = _ends_by_tokens(num_tokens[rows], settings.max_batch_tokens)
    else:
        ends = [*range(size, len(rows), size), len(rows)]
    batches = [Batch(rows=rows[a:b], window=int(window[a])) for a, b in pairwise([0, *ends]) if b > a]
    if settings.batch_size and batches and len(batches[-1].rows) < settings.batch_size:
        return batches[:-1], batches[-1].rows
    return batches, rows[:0]


def _parts(window: NDArray[np.int64]) -> list[slice]:
    bounds = [0, *np.flatnonzero(_changes(window)).tolist(), len(window)]
    return [slice(a, b) for a, b in pairwise(bounds) if b > a]


def _grouped(
    rows: Rows,
    window: int,
    num_tokens: NDArray[np.int32],
    max_tokens: int,
    random: np.random.Generator | None,
) -> Iterator[Batch]:
    """Batches of a window, each of rows of about one length, in random order."""
    by_length = rows[np.argsort(-num_tokens[rows], kind="stable")]
    lengths: list[int] = num_tokens[by_length].tolist()
    starts = [0]
    while starts[-1] < len(rows):
        starts.append(starts[-1] + max(1, max_tokens // lengths[starts[-1]]))
    batches = [by_length[a:b] for a, b in pairwise(starts)]
    order = range(len(batches)) if random is None else random.permutation(len(batches))
    return (Batch(rows=batches[i], window=window) for i in order)


def _ends_by_tokens(lengths: NDArray[np.int32], max_tokens: int) -> list[int]:
    """Where batches end whose lengths sum up to no more than `max_tokens`."""
    sums: list[int] = np.cumsum(lengths, dtype=np.int64).tolist()
    ends: list[int] = []
    start = done = 0
    while start < len(sums):
        start = max(start + 1, bisect_right(sums, done + max_tokens))
        done = sums[start - 1]
        ends.append(start)
    return ends


def _cut_rests(rests: list[Rows], window: int, settings: EpochSettings) -> list[Batch]:
    """Batches of what the readers' last ones lacked rows for."""
    rows = np.concatenate([np.empty(0, np.int64), *rests])
    size = settings.batch_size or 1
    batches = [Batch(rows=rows[a : a + size], window=window) for a in range(0, len(rows), size)]
    if settings.drop_last and batches and len(batches[-1].rows) < size:
        batches.pop()
    return batches


def _with_equal_steps(sequence: list[Batch], settings: EpochSettings, num_ranks: int) -> list[Batch]:
    """As many batches for each rank: the last ones dropped if asked, otherwise large ones among them halved.

    Where all rows are alone already, some ranks take one step more than others.
    """
    if settings.drop_last:
        return sequence[: len(sequence) - len(sequence) % num_ranks]
    while len(sequence) % num_ranks:
        near_end = range(max(0, len(sequence) - 2 * num_ranks), len(sequence))
        k = max(near_end, key=lambda i: len(sequence[i].rows))
        if len(sequence[k].rows) == 1:
            k = max(range(len(sequence)), key=lambda i: len(sequence[i].rows))
        if len(sequence[k].rows) == 1:
            break
        rows, half = sequence[k].rows, len(sequence[k].rows) // 2
        sequence[k : k + 1] = [
            Batch(rows=part, window=sequence[k].window) for part in (rows[:half], rows[half:])
        ]
    return sequence
