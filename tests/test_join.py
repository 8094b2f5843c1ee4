"""Two roots read as one: other layers of the same target, found by the rows' tokens."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from layertap import HiddenStates
from layertap.collate import pack
from layertap.errors import InputError, MissingRowError, SpecMismatchError
from layertap.spec import ExtractionSpec
from layertap.store import Store
from layertap.version_table import NOT_EXTRACTED
from tests.stored import (
    HIDDEN_SIZE,
    SPEC,
    claimed,
    dataset_of,
    new_catalog,
    plan_for,
    publish,
    some_rows,
    states_of,
    with_huge_masks,
    write_attempt,
)

ROWS = some_rows(20)


def fill(folder: Path, numbers: list[int], *, shards: int | None = None, **changes: Any) -> Store:
    """A root with some of the rows, in this order, of which so many shards were extracted."""
    return fill_rows(folder, [ROWS[i] for i in numbers], shards=shards, **changes)


def fill_rows(folder: Path, rows: list[dict[str, Any]], *, shards: int | None, **changes: Any) -> Store:
    """A root with these rows."""
    values = {**SPEC.to_dict(), **changes}
    spec = ExtractionSpec.from_dict(values)
    store = Store.folder(folder / "root")
    catalog = new_catalog(store, spec)
    dataset, scan = dataset_of(rows, folder / "rows.parquet")
    plan = plan_for(dataset, scan, catalog, shard_tokens=200)
    for shard in range(len(plan.shards))[:shards]:
        claim = claimed(catalog, plan, shard)
        catalog.commit(claim, write_attempt(catalog, claim, spec=spec))
    publish(catalog, dataset, scan)
    return store


@pytest.fixture
def first(tmp_path: Path) -> Store:
    return fill(tmp_path / "a", list(range(20)), layer_ids=[0, 5], last_hidden_state="none")


def assert_joined(item: dict[str, Any], store: Store, other: HiddenStates) -> None:
    tokens = ROWS[item["row"]]["input_ids"][:50]
    assert item["input_ids"].tolist() == tokens
    assert item["loss_mask"].tolist() == ROWS[item["row"]]["loss_mask"][:50]
    mine, _ = states_of(tokens, HiddenStates(store).spec)
    theirs, last = states_of(tokens, other.spec)
    assert torch.equal(
        item["hidden_states"], torch.stack([mine[:, 0], theirs[:, 0], theirs[:, 1], mine[:, 1]], 1)
    )
    assert torch.equal(item["last_hidden_state"], last)


def test_rows_have_the_layers_of_both_in_order(first: Store, tmp_path: Path) -> None:
    """The other dataset has the rows in another order."""
    second = fill(tmp_path / "b", list(range(19, -1, -1)), layer_ids=[1, 3])
    other = HiddenStates(second)
    states = HiddenStates(first, join=second)
    assert states.layer_ids == (0, 1, 3, 5)
    assert states.last_hidden_state == "pre_norm"
    assert len(states) == 20 and len(states.missing) == 0
    for item in [*states, *states.stream(), *pickle.loads(pickle.dumps(states)).__getitems__([7, 7, -1])]:
        assert_joined(item, first, other)
    assert sorted(item["row"] for item in states.stream()) == list(range(20))


def test_a_layer_that_both_have_is_there_once(first: Store, tmp_path: Path) -> None:
    second = fill(tmp_path / "b", list(range(20)), layer_ids=[4, 5])
    states = HiddenStates(first, join=HiddenStates(second, version=1))
    assert states.layer_ids == (0, 4, 5)
    tokens = ROWS[6]["input_ids"][:50]
    assert torch.equal(states[6]["hidden_states"][:, 2], states_of(tokens, HiddenStates(first).spec)[0][:, 1])


def test_rows_that_one_root_lacks_are_missing_and_say_why(first: Store, tmp_path: Path) -> None:
    second = fill(tmp_path / "b", list(range(2, 20)), shards=1, layer_ids=[1, 3])
    other = HiddenStates(second, version=1)
    assert 0 < len(other) < 18
    states = HiddenStates(first, join=other)
    assert states.rows.tolist() == (other.rows + 2).tolist()
    for item in states:
        assert_joined(item, first, other)
    reasons = dict(zip(*states.missing.to_pydict().values(), strict=True))
    assert sorted([*reasons, *states.rows.tolist()]) == list(range(20))
    uri = f"version 1 of {second.uri}"
    with pytest.raises(MissingRowError, match=f"row 0 is missing in the join: not in {uri}: its dataset has"):
        states.index_of(0)
    assert reasons[0] == f"not in {uri}: its dataset has no row of these tokens"
    assert reasons[int(other.missing["row"][0].as_py()) + 2] == f"not in {uri}: {NOT_EXTRACTED}"


def test_of_a_row_that_both_roots_lack_both_reasons_are_told(tmp_path: Path) -> None:
    """The second dataset lacks row 0 and has only one shard; so has the first, in another order."""
    first = fill(tmp_path / "a", list(range(20)), shards=1, layer_ids=[0, 5])
    second = fill(tmp_path / "b", list(range(1, 20)), shards=1, layer_ids=[1, 3])
    mine, theirs = HiddenStates(first, version=1), HiddenStates(second, version=1)
    states = HiddenStates(first, version=1, join=theirs)
    of_mine, of_theirs = (f"not in version 1 of {store.uri}: " for store in (first, second))
    for row, reason in zip(*states.missing.to_pydict().values(), strict=True):
        there = "its dataset has no row of these tokens" if row == 0 else NOT_EXTRACTED
        lacking = [f"{of_mine}{NOT_EXTRACTED}"] * (row not in mine.rows)
        lacking += [of_theirs + there] * (row not in theirs.rows + 1)
        assert reason == "; ".join(lacking)
    assert len(states.missing) + len(states) == 20
    assert mine.missing.column_names == states.missing.column_names == ["row", "reason"]


def test_of_three_roots_the_one_that_lacks_a_row_is_told(first: Store, tmp_path: Path) -> None:
    second = fill(tmp_path / "b", list(range(1, 20)), layer_ids=[1, 3])
    third = fill(tmp_path / "c", list(range(2, 20)), layer_ids=[2])
    states = HiddenStates(first, join=HiddenStates(second, join=third))
    assert states.rows.tolist() == list(range(2, 20))
    no_row = "its dataset has no row of these tokens"
    assert states.missing["reason"].to_pylist() == [
        f"not in version 1 of {store.uri}: {no_row}" for store in (second, third)
    ]


@pytest.mark.parametrize("shards", [0, 1], ids=["nothing is stored", "other rows are stored"])
def test_a_join_without_rows_is_an_empty_dataset(first: Store, tmp_path: Path, shards: int) -> None:
    rows = some_rows(4, seed=1)
    second = fill_rows(tmp_path / "b", rows, shards=shards, layer_ids=[1, 3])
    states = HiddenStates(first, join=HiddenStates(second, version=1))
    assert (len(states), states.hidden_size, states.layer_ids) == (0, HIDDEN_SIZE, (0, 1, 3, 5))
    assert states.last_hidden_state == "pre_norm" and states.num_tokens.tolist() == []
    assert len(states.missing) == 20
    assert list(states) == list(states.stream(max_batch_tokens=64)) == states.__getitems__([]) == []
    with pytest.raises(IndexError, match="row 0 of 0 stored rows"):
        states[0]
    assert list(DataLoader(states, batch_size=2, collate_fn=pack)) == []


def test_a_stream_s_state_is_of_both_versions(first: Store, tmp_path: Path) -> None:
    second = fill(tmp_path / "b", list(range(20)), layer_ids=[1, 3])
    other = fill(tmp_path / "c", list(range(19, -1, -1)), layer_ids=[1, 3])
    state = HiddenStates(first, join=second).stream().state_dict()
    HiddenStates(first, join=second).stream().load_state_dict(state)
    with pytest.raises(InputError, match="the state is of another stream"):
        HiddenStates(first, join=other).stream().load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_identity": "folder:4567"},
            "target_identity is 'folder:0123' in one and 'folder:4567' in the",
        ),
        ({"dtype": "float32"}, "dtype is 'bfloat16' in one and 'float32' in the other"),
    ],
)
def test_roots_of_other_targets_are_refused(
    first: Store, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    second = fill(tmp_path / "b", [0], layer_ids=[1], **changes)
    with pytest.raises(SpecMismatchError, match=message):
        HiddenStates(first, join=second)


def test_a_missing_row_says_why_it_is_missing(tmp_path: Path) -> None:
    states = HiddenStates(fill(tmp_path, list(range(20)), shards=1), version=1)
    stored, missing = int(states.rows[2]), int(states.missing["row"][0].as_py())
    assert states.index_of(stored) == 2
    with pytest.raises(MissingRowError, match=f"row {missing} is not stored in .*: {NOT_EXTRACTED}"):
        states.index_of(missing)
    for row in (20, -1):
        with pytest.raises(IndexError, match=f"row {row} of a dataset of 20 rows"):
            states.index_of(row)


def test_masks_of_more_than_2_31_tokens(
    first: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first root are its rows', whatever the other lacks."""
    other = HiddenStates(fill(tmp_path / "b", [7, 3, 19, 12], layer_ids=[1, 2]))
    with_huge_masks(monkeypatch)
    states = HiddenStates(first, join=other)
    assert states.rows.tolist() == [3, 7, 12, 19]
    for item in states:
        assert_joined(item, first, other)
