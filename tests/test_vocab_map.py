"""The drafter's vocabulary against counts made by hand, and in the forms that trainers load."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from layertap.cli import main
from layertap.coordinator import Run
from layertap.errors import InputError
from layertap.store import Store
from layertap.vocab_map import VocabMap
from tests.models import VOCAB_SIZE, saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for

ROWS = [
    {"input_ids": [1, 2, 3, 4, 4], "loss_mask": [0, 0, 1, 1, 1]},
    {"input_ids": [9, 9, 9, 7], "loss_mask": [0, 0, 0, 1]},
    {"input_ids": [1, 2, 3, 4, 4], "loss_mask": [0, 1, 0, 1, 0]},  # the same tokens under another mask
    {"input_ids": [5, VOCAB_SIZE], "loss_mask": [1, 1]},  # refused
    {"input_ids": [8, 8, 7, 6, 300, 6], "loss_mask": [0, 0, 1, 0, 1, 1]},  # cut to 5 tokens
]
COUNTS = {4: 3, 7: 2, 2: 1, 3: 1, 300: 1}
"""Counted by hand: how often each token is supervised, in the first five tokens of the good rows."""

SPECIAL = {500: "<|end|>", 11: "<|start|>"}
BEYOND = "<|pad|>"
"""A special token of the tokenizer's that the target's vocabulary hasn't."""

STOP = 20


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with two special tokens, one more in its tokenizer, and a stop token of its own."""
    folder = tmp_path_factory.mktemp("target")
    words = {f"w{k}": k for k in range(VOCAB_SIZE)}
    words = {SPECIAL.get(k, word): k for word, k in words.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")))
    tokenizer.add_special_tokens(
        {"eos_token": SPECIAL[500], "additional_special_tokens": [SPECIAL[11], BEYOND]}
    )
    saved(tiny_llama(), folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[500, STOP]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_rows(ROWS, tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def root(target: str, tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store.folder(tmp_path_factory.mktemp("root"))
    run = Run.prepare(store, settings_for(tokens, target, max_length=5, max_refused_share=0.5))
    assert run.plan is not None
    run_lane(store, run.plan.plan_id, target)
    run.publish()
    return Path(store.uri.removeprefix("file://"))


def counts() -> np.ndarray:
    return np.bincount(list(COUNTS), list(COUNTS.values()), minlength=VOCAB_SIZE).astype(np.int64)


def test_the_most_frequent_tokens_are_chosen_and_ties_go_to_lower_ids():
    made = VocabMap.choose(counts(), draft_vocab=4)
    assert np.flatnonzero(made.t2d).tolist() == [2, 3, 4, 7]  # 300 is as frequent as 2 and 3
    assert made.d2t.tolist() == [2, 2, 2, 4]
    assert (made.num_supervised, made.num_covered) == (8, 7)


def test_draft_token_i_is_target_token_i_plus_its_offset():
    made = VocabMap.choose(counts(), draft_vocab=10, kept={500, 11})
    chosen = np.arange(10) + made.d2t
    assert chosen.tolist() == np.flatnonzero(made.t2d).tolist()
    # three that never occur fill it up, from the lowest ids
    assert chosen.tolist() == [0, 1, 2, 3, 4, 5, 7, 11, 300, 500]


def test_special_tokens_push_out_frequent_ones():
    made = VocabMap.choose(counts(), draft_vocab=3, kept={500, 11})
    assert np.flatnonzero(made.t2d).tolist() == [4, 11, 500]


@pytest.mark.parametrize(("draft_vocab", "kept"), [(1, {3, 4}), (VOCAB_SIZE + 1, ()), (0, ())])
def test_a_size_that_cannot_be_is_refused(draft_vocab: int, kept: set[int]):
    with pytest.raises(InputError, match=f"draft vocabulary of {draft_vocab} tokens doesn't fit"):
        VocabMap.choose(counts(), draft_vocab=draft_vocab, kept=kept)


def test_a_root_and_its_dataset_give_the_same_map(root: Path, tokens: str, target: str, tmp_path: Path):
    shown = invoke("vocab-map", root, "--draft-vocab", 6, "--out", tmp_path / "a.pt", "--target", target)
    assert shown.exit_code == 0, shown.output
    assert f"6 of {VOCAB_SIZE} tokens, 3 of them special, cover 75.00% of 8 supervised tokens" in shown.output
    limit = ("--max-length", 5)
    other = invoke(
        "vocab-map", tokens, "--draft-vocab", 6, "--out", tmp_path / "b.pt", "--target", target, *limit
    )
    assert other.exit_code == 0, other.output
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert first.keys() == second.keys() == {"d2t", "t2d"}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (first["d2t"].dtype, first["t2d"].dtype) == (torch.int64, torch.bool)
    assert first["t2d"].nonzero().flatten().tolist() == [2, 4, 7, 11, STOP, 500]


def test_a_root_of_the_embedded_stack_is_found_by_its_folder(
    root: Path, target: str, embedded: Callable[[Path], list[str]], tmp_path: Path
):
    rest = ("--draft-vocab", 6, "--out", tmp_path / "map.pt", "--target", target)
    made = invoke("vocab-map", *embedded(root), *rest)
    assert made.exit_code == 0 and "of 8 supervised tokens" in made.output, made.output


def test_a_folder_holds_the_files_that_speculators_looks_for(tokens: str, target: str, tmp_path: Path):
    arguments = ["vocab-map", tokens, "--draft-vocab", 8, "--out", tmp_path / "maps", "--target", target]
    assert invoke(*arguments).exit_code == 0
    d2t, t2d = (np.load(tmp_path / "maps" / f"{name}-8.npy") for name in ("d2t", "t2d"))
    assert (d2t.dtype, d2t.shape, t2d.dtype, t2d.shape) == (np.int64, (8,), np.bool_, (VOCAB_SIZE,))
    again = invoke(*arguments)
    assert again.exit_code == 2 and "exists; nothing is overwritten" in again.stderr


def test_what_is_missing_is_asked_for(tokens: str, tmp_path: Path):
    rest = ["--draft-vocab", 8, "--out", tmp_path / "map.pt"]
    alone = invoke("vocab-map", tokens, *rest)
    assert alone.exit_code == 2 and "for a dataset the target is needed: give --target" in alone.stderr
    bare = invoke("vocab-map", tokens, *rest, "--target", saved(tiny_llama(), tmp_path / "bare"))
    assert bare.exit_code == 2 and "no tokenizer can be loaded from" in bare.stderr
