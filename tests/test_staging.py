"""A slot's bytes are a finished safetensors file, one range a row, whatever rows are dropped."""

import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from layertap.errors import StoppedError
from layertap.spec import ExtractionSpec
from layertap.staging import MAX_SLOTS, BatchLayout, Slot, SlotPool, pack, slot_nbytes, slots_for

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
H = 6

CONVENTION = "id k is the output of decoder layer k, 0-based: Hugging Face hidden_states[k + 1]"


def spec_of(dtype="bfloat16", last="pre_norm", layer_ids=(0, 2, 3)):
    return ExtractionSpec(
        target_identity="folder:0", layer_ids=layer_ids, last_hidden_state=last, dtype=dtype, max_length=100
    )


def layout_of(lengths, spec):
    return BatchLayout.of([f"{k:032x}" for k in range(len(lengths))], lengths, spec=spec, hidden_size=H)


def batch_of(lengths, spec, seed=0):
    """States and ids of a padded batch; the padding is poison."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    states = [
        torch.randn(*shape, H, generator=generator).to(DTYPES[spec.dtype]) for _ in range(spec.num_states)
    ]
    ids = torch.randint(0, 2**31 - 1, shape, generator=generator, dtype=torch.int32)
    for row, n in enumerate(lengths):
        ids[row, n:] = -1
        for state in states:
            state[row, n:] = torch.nan
    return states, ids


def fill(lengths, spec, states, ids):
    layout = layout_of(lengths, spec)
    slot = Slot(layout.file_nbytes + 4 * len(lengths), CPU)
    slot.memory[:] = 255
    pack(slot.words(layout), layout, 0, states, ids, torch.tensor(lengths))
    slot.send(layout, None)
    slot.wait_until_copied()
    return layout, slot


lengths_lists = st.lists(st.integers(1, 9), min_size=1, max_size=14).map(lambda ns: sorted(ns, reverse=True))


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths_lists,
    dtype=st.sampled_from(list(DTYPES)),
    last=st.sampled_from(["pre_norm", "post_norm", "none"]),
    data=st.data(),
)
def test_the_file_holds_the_real_tokens_of_the_kept_rows_and_nothing_else(lengths, dtype, last, data):
    spec = spec_of(dtype, last)
    states, ids = batch_of(lengths, spec)
    layout, slot = fill(lengths, spec, states, ids)
    dropped = data.draw(st.sets(st.integers(0, len(lengths) - 1)))

    kept = slot.finish(layout, dropped)
    file = bytes(slot.file(kept))

    tensors = load(file)
    rows = [row for row in range(len(lengths)) if row not in dropped]
    names = ["hidden_states", "input_ids"] + (["last_hidden_state"] if last != "none" else [])
    assert sorted(tensors) == sorted(f"{row:032x}/{name}" for row in rows for name in names)
    for row in rows:
        n = lengths[row]
        layers = torch.stack([state[row, :n] for state in states[:3]], dim=1)
        assert torch.equal(tensors[f"{row:032x}/hidden_states"], layers)
        assert torch.equal(tensors[f"{row:032x}/input_ids"], ids[row, :n])
        if last != "none":
            assert torch.equal(tensors[f"{row:032x}/last_hidden_state"], states[3][row, :n])
    assert len(file) == layout.data_offset + sum(lengths[row] * spec.bytes_per_token(H) for row in rows)


@given(lengths=lengths_lists, last=st.sampled_from(["pre_norm", "none"]))
def test_a_row_is_one_range_and_ranges_follow_without_holes(lengths, last):
    spec = spec_of(last=last)
    layout = layout_of(lengths, spec)
    header = json.loads(layout.header()[8:])

    position = layout.data_offset
    for row, n in enumerate(lengths):
        assert layout.offsets[row] == position
        assert layout.nbytes[row] == n * spec.bytes_per_token(H)
        mine = [e["data_offsets"] for name, e in header.items() if name.startswith(f"{row:032x}/")]
        assert min(begin for begin, _ in mine) + layout.data_offset == position
        position += layout.nbytes[row]
        assert max(end for _, end in mine) + layout.data_offset == position
    assert position == layout.file_nbytes


@given(lengths=lengths_lists)
def test_dropping_rows_moves_neither_the_data_nor_the_size_of_the_header(lengths):
    layout = layout_of(lengths, spec_of())
    for dropped in ({0}, {len(lengths) - 1}, set(range(len(lengths)))):
        kept = layout.without(dropped)
        assert kept.data_offset == layout.data_offset == len(kept.header()) == len(layout.header())
        assert layout.data_offset % 64 == 0


def test_the_metadata_says_what_the_states_are():
    spec = spec_of(last="post_norm")
    metadata = json.loads(layout_of([3, 1], spec).header()[8:])["__metadata__"]
    assert metadata == {
        "format_version": "1.0",
        "spec_fingerprint": spec.fingerprint,
        "layer_ids": "[0, 2, 3]",
        "layer_id_convention": CONVENTION,
        "last_hidden_state": "post_norm",
        "num_rows": "2",
        "keys_order": "file",
    }


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 2, 3])
def test_a_row_with_any_state_that_is_not_finite_is_flagged_and_no_other(dtype, bad, where):
    spec = spec_of(dtype)
    lengths = [5, 5, 3, 1]
    states, ids = batch_of(lengths, spec)
    states[where][2, 2, 1] = bad
    layout, slot = fill(lengths, spec, states, ids)
    assert slot.unfinite_rows(layout) == [2]


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_large_finite_states_are_not_flagged(dtype):
    spec = spec_of(dtype)
    states, ids = batch_of([4, 2], spec)
    for state in states:
        state[:] = torch.finfo(DTYPES[dtype]).max
    layout, slot = fill([4, 2], spec, states, ids)
    assert slot.unfinite_rows(layout) == []


def test_rows_packed_in_parts_give_the_same_file():
    spec, lengths = spec_of(), [6, 5, 5, 2]
    states, ids = batch_of(lengths, spec)
    layout, whole = fill(lengths, spec, states, ids)
    parts = Slot(len(whole.memory), CPU)
    for first, end in ((2, 4), (0, 2)):
        longest = lengths[first]
        some = [state[first:end, :longest] for state in states]
        tokens = torch.tensor(lengths[first:end])
        pack(parts.words(layout), layout, first, some, ids[first:end, :longest], tokens)
    for slot in (whole, parts):
        assert slot.unfinite_rows(layout) == []
        slot.finish(layout, ())
    assert bytes(parts.file(layout)) == bytes(whole.file(layout))


@given(lengths=lengths_lists, dtype=st.sampled_from(list(DTYPES)))
def test_a_slot_of_the_stated_size_holds_any_batch_of_so_many_bytes(lengths, dtype):
    spec = spec_of(dtype, layer_ids=(0,), last="none")
    layout = layout_of(lengths, spec)
    slot = Slot(slot_nbytes(layout.data_nbytes, spec=spec, hidden_size=H), CPU)
    assert len(slot.words(layout)) * spec.item_bytes == layout.data_nbytes + len(lengths) * spec.item_bytes


@pytest.mark.parametrize("batch_bytes", [503_000_000, 400_000_000, 60_000_000, 4_000_000_000])
@pytest.mark.parametrize("bytes_per_s", [0.74e9, 1.8e9, 18e9])
def test_slots_take_what_the_device_makes_while_a_store_stalls_a_second(batch_bytes, bytes_per_s):
    on_their_way = slots_for(batch_bytes, bytes_per_s=bytes_per_s) - 2
    assert 2 <= on_their_way <= MAX_SLOTS - 2
    assert on_their_way * batch_bytes >= bytes_per_s or on_their_way == MAX_SLOTS - 2
    assert (on_their_way - 1) * batch_bytes < bytes_per_s or on_their_way == 2


def test_a_pool_hands_out_each_slot_once_and_takes_it_back():
    pool = SlotPool(2, 64, CPU)
    first, second = pool.acquire(lambda: None), pool.acquire(lambda: None)
    assert first is not second
    releasing = threading.Timer(0.1, pool.release, [first])
    releasing.start()
    assert pool.acquire(lambda: None) is first
    releasing.join()


def test_waiting_for_a_slot_can_be_ended():
    pool = SlotPool(1, 64, CPU)
    pool.acquire(lambda: None)

    def stop():
        raise StoppedError("told to stop")

    with pytest.raises(StoppedError):
        pool.acquire(stop)


def test_the_file_is_the_memory_of_the_slot():
    layout, slot = fill([2], spec_of(), *batch_of([2], spec_of()))
    slot.finish(layout, ())
    assert np.shares_memory(np.frombuffer(slot.file(layout), np.uint8), slot.memory)
