"""Each row once, batches within the budget, shards of one cost, whatever the order of the rows."""

from dataclasses import asdict, replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.errors import SpecError
from layertap.plan import Estimate, PlanSettings, estimate, make_plan
from layertap.spec import ExtractionSpec
from layertap.store import PART_BYTES

SPEC = ExtractionSpec(target_identity="test", layer_ids=(0, 2), max_length=64)


def keys_of(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, 16), np.uint8)


def plan_of(lengths, keys=None, **options):
    lengths = np.array(lengths, np.int32)
    keys = keys_of(len(lengths)) if keys is None else keys
    return make_plan(keys, lengths, spec_fingerprint="f" * 32, settings=PlanSettings(**options))


def batches_of(plan) -> list[tuple[int, int, list[int]]]:
    """(shard, batch, lengths) in plan order, spelled out."""
    triples = zip(plan.shard.tolist(), plan.batch.tolist(), plan.num_tokens.tolist(), strict=True)
    return [(*place, [n for *_, n in rows]) for place, rows in groupby(triples, lambda t: t[:2])]


any_lengths = st.lists(st.integers(1, 64), max_size=80)
any_budget = st.integers(1, 300)
any_shard = st.integers(1, 500)


@settings(max_examples=300, deadline=None)
@given(lengths=any_lengths, max_batch_tokens=any_budget, shard_tokens=any_shard)
def test_any_plan(lengths, max_batch_tokens, shard_tokens):
    keys = keys_of(len(lengths))
    plan = plan_of(lengths, keys, max_batch_tokens=max_batch_tokens, shard_tokens=shard_tokens)
    assert sorted(plan.rows.tolist()) == list(range(len(lengths))), "each row exactly once"
    assert plan.num_tokens.tolist() == [lengths[row] for row in plan.rows]
    assert plan.keys.tobytes() == keys[plan.rows].tobytes()

    batches = batches_of(plan)
    assert len(batches) == len(plan.batch_starts()) == len({place[:2] for place in batches}), (
        "no batch is split"
    )
    for _, _, batch in batches:
        assert len(batch) * batch[0] <= max_batch_tokens or len(batch) == 1
        assert batch == sorted(batch, reverse=True)

    slices = plan.shard_slices()
    assert len(slices) == plan.num_shards == min(len(batches), -(-sum(lengths) // shard_tokens))
    assert [i for part in slices for i in range(len(lengths))[part]] == list(range(len(lengths)))
    for shard, part in enumerate(slices):
        assert set(plan.shard[part].tolist()) == {shard}, "no shard is empty"
        numbers = [batch for number, batch, _ in batches if number == shard]
        assert numbers == list(range(len(numbers)))
        firsts = [lengths[0] for number, _, lengths in batches if number == shard]
        assert firsts == sorted(firsts, reverse=True), "longest first: memory peaks at the start"

    if plan.num_shards:
        costs = [(shard, len(batch) * batch[0]) for shard, _, batch in batches]
        loads = [sum(cost for number, cost in costs if number == shard) for shard in range(plan.num_shards)]
        assert max(loads) - min(loads) <= max(cost for _, cost in costs), "no move of a batch would help"


@settings(max_examples=100, deadline=None)
@given(lengths=any_lengths, seed=st.integers(0, 99), max_batch_tokens=any_budget, shard_tokens=any_shard)
def test_the_order_of_the_rows_does_not_matter(lengths, seed, max_batch_tokens, shard_tokens):
    options = {"max_batch_tokens": max_batch_tokens, "shard_tokens": shard_tokens}
    keys, order = keys_of(len(lengths)), np.random.default_rng(seed).permutation(len(lengths))
    plan = plan_of(lengths, keys, **options)
    other = plan_of(np.array(lengths, np.int32)[order], keys[order], **options)
    assert other.plan_id == plan.plan_id
    for name in ("keys", "num_tokens", "batch", "shard"):
        assert np.array_equal(getattr(other, name), getattr(plan, name)), name
    assert np.array_equal(order[other.rows], plan.rows)


def test_real_lengths_pad_little_and_balance_well():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1.1, 50_000), 1, 4096).astype(np.int32)
    found = estimate(plan_of(lengths, shard_tokens=500_000), spec=SPEC, hidden_size=64, num_parameters=1)
    assert found.padding_share < 0.005
    assert found.imbalance < 0.03


def test_a_batch_is_filled():
    assert [batch for *_, batch in batches_of(plan_of([4] * 5, max_batch_tokens=8))] == [[4, 4], [4, 4], [4]]
    assert [batch for *_, batch in batches_of(plan_of([9, 2, 2], max_batch_tokens=4))] == [[9], [2, 2]]


def test_the_dearest_batches_are_dealt_first():
    plan = plan_of([6, 6, 5, 5], max_batch_tokens=10, shard_tokens=11)
    assert [lengths for *_, lengths in batches_of(plan)] == [[5, 5], [6], [6]]
    assert plan.num_shards == 2 and plan.shard.tolist() == [0, 0, 1, 1]


def test_plan_id_names_what_is_planned():
    lengths, keys = np.full(4, 3, np.int32), keys_of(4)
    arguments = {"spec_fingerprint": "a" * 32, "settings": PlanSettings()}
    plans = [
        make_plan(keys, lengths, **arguments),
        make_plan(keys[:3], lengths[:3], **arguments),
        make_plan(keys_of(4, seed=1), lengths, **arguments),
        make_plan(keys, lengths, **{**arguments, "spec_fingerprint": "b" * 32}),
        make_plan(keys, lengths, **{**arguments, "settings": PlanSettings(max_batch_tokens=8)}),
        make_plan(keys, lengths, **{**arguments, "settings": PlanSettings(shard_tokens=8)}),
    ]
    assert len({plan.plan_id for plan in plans}) == len(plans)
    assert all(len(plan.plan_id) == 32 and int(plan.plan_id, 16) >= 0 for plan in plans)


def test_plan_id_and_order_are_the_same_on_every_machine():
    keys = np.array([[1] + [0] * 15, [0] * 15 + [2], [0, 1] + [0] * 14], np.uint8)
    plan = make_plan(keys, np.array([5, 5, 5], np.int32), spec_fingerprint="0" * 32, settings=PlanSettings())
    assert plan.rows.tolist() == [1, 2, 0], "ties go by the keys' bytes"
    assert plan.plan_id == "182b860c5067454ad821c11088b929e2", "stored plans must keep their names"


def test_estimate_of_a_small_plan():
    plan = plan_of([5, 4, 4, 1], max_batch_tokens=10, shard_tokens=7)
    assert [batch for *_, batch in batches_of(plan)] == [[5, 4], [4, 1]]
    found = estimate(plan, spec=SPEC, hidden_size=8, num_parameters=1_800, flops_per_s=1.0)
    bytes_per_token = 3 * 8 * 2 + 4
    assert found == Estimate(
        num_rows=4,
        num_tokens=14,
        num_batches=2,
        num_shards=2,
        data_bytes=14 * bytes_per_token,
        padded_tokens=18,
        padding_share=pytest.approx(4 / 18),
        gpu_hours=18.0,
        num_requests=2 * 1 + 2 * 5,
        max_batch_bytes=9 * bytes_per_token,
        imbalance=pytest.approx(1 / 9),
    )


def test_large_batches_are_put_in_parts():
    hidden_size = PART_BYTES // 4  # a float32 token with one state: a part and four bytes
    spec = replace(SPEC, layer_ids=(0,), last_hidden_state="none", dtype="float32")
    found = estimate(plan_of([3]), spec=spec, hidden_size=hidden_size, num_parameters=1)
    assert found.num_requests == (4 + 2) + 5


def test_nothing_to_plan():
    plan = plan_of([])
    found = estimate(plan, spec=SPEC, hidden_size=8, num_parameters=1)
    assert plan.shard_slices() == [] and plan.num_shards == 0
    assert set(asdict(found).values()) == {0}


@pytest.mark.parametrize("name", ["max_batch_tokens", "shard_tokens"])
def test_settings_below_one(name):
    with pytest.raises(SpecError, match=f"{name} is 0; it must be at least 1"):
        PlanSettings(**{name: 0})


@pytest.mark.parametrize("name", ["max_batch_tokens", "shard_tokens"])
@pytest.mark.parametrize("value", [1.5, True, "8"])
def test_settings_that_are_no_integers(name, value):
    with pytest.raises(SpecError, match=f"{name} is {value!r}; it must be an integer"):
        PlanSettings(**{name: value})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"layer_ids": (True, 2)}, r"layer ids \[True, 2\] must be integers"),
        ({"layer_ids": (1.0,)}, r"layer ids \[1.0\] must be integers"),
        ({"layer_ids": (1, "x")}, r"layer ids \[1, 'x'\] must be integers"),
        ({"max_length": 1.5}, "max_length is 1.5; it must be an integer"),
    ],
)
def test_a_spec_of_other_types(fields, text):
    with pytest.raises(SpecError, match=text):
        replace(SPEC, **fields)
