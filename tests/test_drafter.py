"""The example that trains a drafter: it learns from the store what it would learn from live states."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap import HiddenStates
from layertap.coordinator import Run
from layertap.store import Store
from layertap.vocab_map import VocabMap
from tests.models import VOCAB_SIZE, saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import compare_drafters  # noqa: E402
import smollm2_root  # noqa: E402
import train_drafter  # noqa: E402

LAYERS = (0, 1)
"""Places among the stored layers 0, 2 and 3."""

SETTINGS = train_drafter.Settings(steps=12, rows=4, workers=0)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> HiddenStates:
    folder = tmp_path_factory.mktemp("drafter")
    dataset, target = save_rows(some_rows(24), folder / "tokens"), saved(tiny_llama(), folder / "target")
    run = Run.prepare(Store.folder(folder / "root"), settings_for(dataset, target))
    assert run.plan is not None
    run_lane(run.catalog.store, run.plan.plan_id, target)
    run.publish()
    return HiddenStates(folder / "root")


@pytest.fixture(scope="module")
def target(stored: HiddenStates, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("map") / "map.pt"
    VocabMap.choose(np.ones(VOCAB_SIZE, np.int64), draft_vocab=400).save(path)
    return train_drafter.Target(stored, path)


def trained(target: Any, rows: Any) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    drafter = train_drafter.Drafter(target, len(LAYERS))
    report = train_drafter.train(drafter, rows, SETTINGS)
    assert 0 <= report.wait_share <= 1
    return drafter, report.losses


def test_losses_on_stored_and_on_live_states_are_equal(stored: HiddenStates, target: Any):
    numbers = range(len(stored))
    _, from_store = trained(target, compare_drafters.ArmRows(stored, numbers, LAYERS))
    _, live = trained(target, compare_drafters.LiveRows(stored, numbers, LAYERS))
    assert from_store == pytest.approx(live, abs=1e-3)
    assert np.isfinite(from_store).all() and np.mean(from_store[-3:]) < np.mean(from_store[:3])


def test_a_control_learns_from_something_else(stored: HiddenStates, target: Any):
    numbers = range(len(stored))
    _, right = trained(target, compare_drafters.ArmRows(stored, numbers, LAYERS))
    for wrong in (
        compare_drafters.ArmRows(stored, numbers, (1, 2)),
        compare_drafters.ArmRows(stored, numbers, LAYERS, shuffled=True),
    ):
        _, losses = trained(target, wrong)
        assert losses != pytest.approx(right, abs=1e-3)


def test_chats_of_the_target_are_held_out_and_not_trained_on(
    stored: HiddenStates, target: Any, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SystemExit, match="no row held out has an answer that the target wrote"):
        train_drafter.split(stored, target)  # some_rows are nobody's words
    own = [0, 1, 12]
    monkeypatch.setattr(train_drafter.Target, "wrote", lambda _, row: row["row"] in own)
    training, held_out = train_drafter.split(stored, target)
    assert held_out == [0, 12]  # every sixth
    assert sorted(training + held_out) == list(range(len(stored)))


def test_an_answer_is_the_target_s_if_it_is_what_it_finds_likeliest(stored: HiddenStates, target: Any):
    row = max(stored, key=lambda row: int(row["loss_mask"].sum()))
    at = row["loss_mask"].nonzero()[:, 0]
    likeliest = target.draft_ids[target.probabilities(row["last_hidden_state"][at - 1]).argmax(-1)]
    row["input_ids"][at] = likeliest.to(torch.int32)
    assert target.wrote(row)


def test_windows_cover_the_rows_and_ends_are_their_last(
    stored: HiddenStates, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(train_drafter, "WINDOW", 7)
    windows = train_drafter.Rows(stored, [3, 5])
    for number in (3, 5):
        parts = [windows[k]["input_ids"] for k, (i, _) in enumerate(windows.windows) if i == number]
        whole = stored[number]["input_ids"].tolist()
        assert torch.cat(parts[::-1]).tolist() == whole
    ends = train_drafter.Rows(stored, [3, 5], ends_only=True)
    assert [end["input_ids"].tolist() for end in ends] == [
        stored[i]["input_ids"][-7:].tolist() for i in (3, 5)
    ]


@torch.inference_mode()
def one_by_one(drafter: Any, row: dict[str, Tensor], place: int, num_drafted: int) -> list[int]:
    """The draft at one place, with everything computed anew for each token."""
    features = train_drafter.scaled(row["features"])[: place + 1]
    ids, drafted = row["input_ids"][1 : place + 2], []
    for _ in range(num_drafted):
        logits, states = drafter.all_at_once(features[None], ids[None], [])
        drafted.append(int(drafter.target.draft_ids[logits[0, -1].argmax()]))
        features = torch.cat([features, train_drafter.scaled(states[0, -1:])])
        ids = torch.cat([ids, torch.tensor(drafted[-1:])])
    return drafted


def test_drafts_at_all_places_at_once_are_those_made_one_by_one(stored: HiddenStates, target: Any):
    numbers = range(len(stored))
    rows = compare_drafters.ArmRows(stored, numbers, LAYERS)
    drafter, _ = trained(target, rows)
    row = max((rows[i] for i in range(len(rows))), key=lambda row: len(row["input_ids"]))
    together = train_drafter.draft(drafter, row, 3, 9, 4)
    assert together.tolist() == [one_by_one(drafter, row, place, 4) for place in range(3, 9)]


def test_acceptance_length_counted_by_hand(monkeypatch: pytest.MonkeyPatch):
    answer = [5, 6, 7, 8, 9]
    row = {"input_ids": torch.tensor([1, 2, *answer]), "loss_mask": torch.tensor([0, 0, 1, 1, 1, 1, 1])}
    # after 5 two of three are right, so that the target adds 8; after 8 none is, and it adds 9
    drafts = torch.tensor([[6, 7, 0], [0, 0, 0], [0, 0, 0], [3, 9, 9]])
    monkeypatch.setattr(train_drafter, "draft", lambda *_: drafts)
    assert train_drafter.acceptance_length(None, [row], 3) == 4 / 2


def test_chats_held_out_are_of_subjects_that_none_to_train_on_is_of():
    own = [{"id": f"evals/subject-{k % 40}:{k}", "messages": []} for k in range(200)]
    own += [{"id": f"ifbench:{k}", "messages": []} for k in range(30)]
    others = [{"id": f"ifbench:{k}", "messages": []} for k in range(30, 90)]
    chats = list(smollm2_root.dealt(own, others))
    assert len({chat["id"] for chat in chats}) == len(chats) > len(own + others) - 6
    held_out = chats[:: train_drafter.HELD_OUT]
    training = [chat for chat in chats if chat not in held_out]
    subjects = {smollm2_root.subject(chat) for chat in held_out}
    assert not subjects & {smollm2_root.subject(chat) for chat in training}
    assert not {*map(str, held_out)} & {*map(str, others)} and len(subjects) > 5
