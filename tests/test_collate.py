"""What a batch holds is its rows, bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.collate import pack, pad

NUM_LAYERS, HIDDEN_SIZE = 3, 4


def rows_of(lengths: list[int], *, stores_last: bool) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(torch.bfloat16)

    return [
        {
            "input_ids": torch.randint(1, 1000, (n,), generator=random, dtype=torch.int32),
            "loss_mask": torch.randint(0, 2, (n,), generator=random, dtype=torch.uint8),
            "hidden_states": states(n, NUM_LAYERS, HIDDEN_SIZE),
            **({"last_hidden_state": states(n, HIDDEN_SIZE)} if stores_last else {}),
            "row": 100 + k,
        }
        for k, n in enumerate(lengths)
    ]


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@settings(max_examples=50, deadline=None)
@given(lengths, st.booleans())
def test_packed_rows_are_the_rows(lengths: list[int], stores_last: bool) -> None:
    rows = rows_of(lengths, stores_last=stores_last)
    batch = pack(rows)
    bounds = batch["cu_seqlens"].tolist()
    assert bounds[0] == 0 and batch["cu_seqlens"].dtype == torch.int32
    assert (batch["max_seqlen"], batch["row"].tolist()) == (max(lengths), [row["row"] for row in rows])
    for k, row in enumerate(rows):
        part = slice(bounds[k], bounds[k + 1])
        for name in set(row) - {"row"}:
            assert batch[name].dtype == row[name].dtype
            assert torch.equal(batch[name][part], row[name])
        assert batch["position_ids"][part].tolist() == list(range(lengths[k]))
        assert set(batch["document_ids"][part].tolist()) == {k}
    assert bounds[-1] == len(batch["input_ids"]) == len(batch["document_ids"])
    assert ("last_hidden_state" in batch) == stores_last


@settings(max_examples=50, deadline=None)
@given(lengths, st.booleans())
def test_padded_rows_are_the_rows_and_zeros(lengths: list[int], stores_last: bool) -> None:
    rows = rows_of(lengths, stores_last=stores_last)
    batch = pad(rows)
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["row"].tolist() == [row["row"] for row in rows]
    for k, row in enumerate(rows):
        for name in set(row) - {"row"}:
            assert batch[name].dtype == row[name].dtype
            assert torch.equal(batch[name][k, : lengths[k]], row[name])
            assert not batch[name][k, lengths[k] :].any()
        assert batch["attention_mask"][k, : lengths[k]].all()
    assert ("last_hidden_state" in batch) == stores_last


@pytest.mark.parametrize("collate", [pack, pad])
def test_batches_own_their_memory(collate: Any) -> None:
    rows = rows_of([4], stores_last=True)
    collate(rows)["hidden_states"].zero_()
    assert rows[0]["hidden_states"].any()


def test_rows_that_are_views_of_others_are_copied_as_they_read() -> None:
    [row] = rows_of([6], stores_last=True)
    picked = row | {
        "hidden_states": row["hidden_states"][:, [2, 0]],
        "last_hidden_state": row["hidden_states"][:, 1],
    }
    batch = pack([picked, picked])
    assert torch.equal(batch["hidden_states"], torch.cat([picked["hidden_states"]] * 2))
    assert torch.equal(batch["last_hidden_state"], torch.cat([picked["last_hidden_state"]] * 2))


@pytest.mark.parametrize("collate", [pack, pad])
def test_memory_is_used_again_only_when_nobody_holds_the_batch(collate: Any) -> None:
    rows = rows_of([5, 900], stores_last=True)
    wanted = collate(rows)["hidden_states"].clone()
    kept = collate(rows)["hidden_states"].view(torch.int16)[1:]  # no more than a view of it
    addresses = []
    for _ in range(4):
        for row in rows:
            row["hidden_states"].add_(1)
        addresses.append(collate(rows)["hidden_states"].data_ptr())
    assert torch.equal(kept, wanted.view(torch.int16)[1:])
    assert len(set(addresses)) == 1
