"""Each row once an epoch, whoever shares it; and the rest of an epoch for whoever reads on."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.epoch import CHUNK_BYTES, Batch, EpochSettings, RowPlaces, Segment, remaining_batches
from layertap.errors import InputError

MAX_EXAMPLES = 60


def places_of(
    num_rows: int, *, seed: int = 0, row_bytes: int = CHUNK_BYTES // 5, same: bool = False
) -> RowPlaces:
    """Rows of random lengths in files of a few, in no order; some of them share a place."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 60, num_rows)
    file = np.arange(num_rows) // 7
    nbytes = lengths * (row_bytes // 30)
    ends = np.cumsum(nbytes)
    offset = ends - nbytes - (ends - nbytes)[file * 7]
    order = random.integers(0, max(1, num_rows), num_rows) if same else random.permutation(num_rows)
    return RowPlaces(
        file=file[order].astype(np.int32),
        offset=offset[order],
        nbytes=nbytes[order],
        num_tokens=lengths[order].astype(np.int32),
    )


def plan(
    places: RowPlaces, given_settings: EpochSettings, *segments: tuple[int, int, int], epoch: int = 0
) -> list[Batch]:
    parts = tuple(Segment(num_ranks=r, num_workers=w, num_steps=n) for r, w, n in segments)
    return remaining_batches(places, given_settings, epoch=epoch, segments=parts)


def rows_of(batches: list[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.rows]


ways = st.sampled_from(
    [
        {},
        {"batch_size": 1},
        {"batch_size": 4},
        {"max_batch_tokens": 100},
        {"max_batch_tokens": 20},
        {"max_batch_tokens": 100, "group_by_length": False},
    ]
)
seeds = st.one_of(st.none(), st.integers(0, 5))
windows = st.sampled_from([1, CHUNK_BYTES, 5 * CHUNK_BYTES, 512 << 20])
ranks, workers = st.integers(1, 8), st.integers(1, 4)


@settings(max_examples=MAX_EXAMPLES, deadline=None)
@given(st.integers(0, 120), ways, seeds, windows, ranks, workers, st.booleans())
def test_every_row_once_an_epoch(
    num_rows: int,
    way: dict[str, Any],
    seed: int | None,
    window_bytes: int,
    num_ranks: int,
    num_workers: int,
    same: bool,
) -> None:
    places = places_of(num_rows, same=same)
    way_settings = EpochSettings(seed=seed, window_bytes=window_bytes, **way)
    batches = plan(places, way_settings, (num_ranks, num_workers, 0))
    assert sorted(rows_of(batches)) == list(range(num_rows))
    assert all(len(batch.rows) for batch in batches)
    if len(batches) % num_ranks:
        assert all(len(batch.rows) == 1 for batch in batches)


@settings(max_examples=MAX_EXAMPLES, deadline=None)
@given(
    ways,
    seeds,
    windows,
    st.lists(st.tuples(ranks, workers, st.integers(0, 12)), min_size=1, max_size=4),
    st.booleans(),
)
def test_whoever_reads_on_the_rest_is_what_is_left(
    way: dict[str, Any],
    seed: int | None,
    window_bytes: int,
    segments: list[tuple[int, int, int]],
    same: bool,
) -> None:
    """Ranks and workers change between the parts of an epoch; each row is still read once."""
    places = places_of(90, same=same)
    way_settings = EpochSettings(seed=seed, window_bytes=window_bytes, **way)
    read: list[int] = []
    for k, (num_ranks, _, num_steps) in enumerate(segments):
        batches = plan(places, way_settings, *segments[: k + 1])
        is_last = k + 1 == len(segments)
        read += rows_of(batches if is_last else batches[: num_ranks * num_steps])
    assert sorted(read) == list(range(90))


@settings(max_examples=MAX_EXAMPLES, deadline=None)
@given(seeds, windows, ranks, workers, st.integers(1, 200), st.booleans())
def test_batches_stay_within_their_tokens(
    seed: int | None, window_bytes: int, num_ranks: int, num_workers: int, max_tokens: int, grouped: bool
) -> None:
    places = places_of(120)
    token_settings = EpochSettings(
        seed=seed, window_bytes=window_bytes, max_batch_tokens=max_tokens, group_by_length=grouped
    )
    for batch in plan(places, token_settings, (num_ranks, num_workers, 0)):
        lengths = places.num_tokens[batch.rows]
        counted = len(lengths) * lengths.max() if grouped else lengths.sum()
        assert counted <= max_tokens or len(lengths) == 1


@settings(max_examples=MAX_EXAMPLES, deadline=None)
@given(seeds, windows, ranks, workers, st.integers(1, 9))
def test_with_drop_last_all_batches_are_full_and_steps_equal(
    seed: int | None, window_bytes: int, num_ranks: int, num_workers: int, size: int
) -> None:
    size_settings = EpochSettings(seed=seed, window_bytes=window_bytes, batch_size=size, drop_last=True)
    batches = plan(places_of(120), size_settings, (num_ranks, num_workers, 0))
    assert len(batches) == 120 // size // num_ranks * num_ranks
    assert all(len(batch.rows) == size for batch in batches)
    assert len(set(rows_of(batches))) == len(batches) * size


def test_only_the_last_batch_has_fewer_rows() -> None:
    batches = plan(places_of(122), EpochSettings(batch_size=5, window_bytes=1), (1, 3, 0))
    assert [len(batch.rows) for batch in batches] == [5] * 24 + [2]


def test_batches_grouped_by_length_hardly_pad() -> None:
    places = places_of(2_000)
    batches = plan(places, EpochSettings(max_batch_tokens=400, window_bytes=1 << 40), (1, 1, 0))
    padded = sum(len(b.rows) * int(places.num_tokens[b.rows].max()) for b in batches)
    assert padded < 1.05 * places.num_tokens.sum()
    assert len(batches) < 1.1 * places.num_tokens.sum() / 400


def test_seed_and_epoch_make_the_order() -> None:
    places = places_of(100)
    orders = {
        (seed, epoch): rows_of(plan(places, EpochSettings(seed=seed), (1, 1, 0), epoch=epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    assert orders[0, 1] == rows_of(plan(places, EpochSettings(seed=0), (1, 1, 0), epoch=1))


def test_without_a_seed_rows_come_as_they_lie() -> None:
    places = places_of(100)
    order = rows_of(plan(places, EpochSettings(seed=None), (1, 1, 0)))
    assert all(
        (places.file[a], places.offset[a]) < (places.file[b], places.offset[b]) for a, b in pairwise(order)
    )


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (2, 3), (8, 2)])
def test_a_reader_reads_whole_chunks_of_its_own(num_ranks: int, num_workers: int) -> None:
    """Few rows of a chunk are read by anybody but its owner, and rows far apart share a batch."""
    places = places_of(20_000, row_bytes=CHUNK_BYTES // 50)
    batches = plan(
        places, EpochSettings(batch_size=8, window_bytes=8 * CHUNK_BYTES), (num_ranks, num_workers, 0)
    )
    readers: dict[int, list[int]] = {}
    for k, batch in enumerate(batches):
        reader = k % num_ranks * num_workers + k // num_ranks % num_workers
        for i in batch.rows:
            readers.setdefault(int(places.file[i]), []).append(reader)
    owned = sum(max(readers_.count(r) for r in set(readers_)) for readers_ in readers.values())
    assert owned > 0.85 * len(places)
    num_files = [len(set(places.file[batch.rows].tolist())) for batch in batches]
    assert np.mean(num_files) > 7


def test_rows_larger_than_a_chunk_are_shuffled_over_everything() -> None:
    places = places_of(1_000, row_bytes=40 * CHUNK_BYTES)
    order = np.array(rows_of(plan(places, EpochSettings(window_bytes=1), (1, 1, 0))))
    neighbours = np.abs(np.diff(places.file[order])) <= 1
    assert neighbours.mean() < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be an integer of at least 1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"max_batch_tokens": 2.5}, "max_batch_tokens is 2.5"),
        ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
        ({"window_bytes": None}, "window_bytes is None"),
        ({"batch_size": 2, "max_batch_tokens": 2}, "give one of them"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EpochSettings(**change)
