"""A root's canary tells a lane that computes something else from a canary that was damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from layertap.canary import CANARY, read_canary, share_canary
from layertap.coordinator import Run
from layertap.errors import IntegrityError
from layertap.store import Store
from layertap.verify import verify_root
from tests.models import saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows

STATES = {"input_ids": torch.arange(4), "layer_0": torch.ones(4, 8), "layer_2": torch.zeros(4, 8)}

DAMAGES = [
    lambda whole: b"",
    lambda whole: whole[:-5],
    lambda whole: whole[:-5] + bytes([whole[-5] ^ 0x40]) + whole[-4:],
    lambda whole: whole.replace(b"layer_2", b"layer_3"),
    lambda whole: b"<html>" + whole,
]


def test_who_comes_later_gets_the_first_one_s(store: Store) -> None:
    share_canary(store, STATES)
    found = share_canary(store, {"input_ids": torch.arange(2)})
    assert found.keys() == STATES.keys()
    assert all(torch.equal(found[name], state) for name, state in STATES.items())


def test_one_without_a_checksum_is_read(folder_store: Store) -> None:
    """As an older layertap wrote it."""
    folder_store.create(CANARY, save(STATES))
    assert read_canary(folder_store).keys() == STATES.keys()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_after_one_more_try(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    share_canary(folder_store, STATES)
    whole = folder_store.get(CANARY)
    answers = [damage(whole), whole]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "get", lambda *_: answers.pop(0))
        assert read_canary(folder_store).keys() == STATES.keys()
    folder_store.put(CANARY, damage(whole))
    with pytest.raises(IntegrityError, match="hasn't the bytes that were written. remove .*canary"):
        read_canary(folder_store)


def test_no_lane_is_blamed_for_a_damaged_canary_and_the_way_out_helps(
    folder_store: Store, tmp_path: Path
) -> None:
    target = saved(tiny_llama(), tmp_path / "target")
    for num_rows in (10, 20, 30):
        run = Run.prepare(
            folder_store, settings_for(save_rows(some_rows(num_rows), tmp_path / f"{num_rows}"), target)
        )
        assert run.plan is not None
        if num_rows == 20:
            folder_store.put(CANARY, folder_store.get(CANARY)[:-1])
            with pytest.raises(IntegrityError, match="canary"):
                run_lane(folder_store, run.plan.plan_id, target)
            (finding,) = verify_root(folder_store).findings
            assert finding.where == CANARY
            assert f"remove {folder_store.uri}/{CANARY}" in finding.way_out
            assert finding.way_out not in finding.problem
            folder_store.delete([CANARY])
        run_lane(folder_store, run.plan.plan_id, target)
    verify_root(folder_store).check()
