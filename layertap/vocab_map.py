"""A drafter's smaller vocabulary: the tokens it may predict, by how often they are supervised.

The two tables are those of EAGLE-3, SpecForge and speculators. Draft tokens are numbered in the order of
their target ids: `d2t` int64 [D] holds **offsets**, so that draft token i is target token `i + d2t[i]`;
`t2d` bool [V] says which target tokens are among them.
"""

import tempfile
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from layertap.catalog import ROOT, Catalog, shard_of
from layertap.dataset import TokenDataset
from layertap.errors import InputError, TargetError
from layertap.keys import keys_of
from layertap.object_server import open_root
from layertap.reader import HiddenStates
from layertap.store import Store
from layertap.target_info import inspect_target
from layertap.versions import Versions


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabMap:
    """Which target tokens a drafter may predict."""

    d2t: NDArray[np.int64]
    """[D] offset of each draft token: its target id is its own number plus this."""

    t2d: NDArray[np.bool_]
    """[V] whether a target token is a draft token."""

    num_supervised: int
    """Tokens under the loss masks."""

    num_covered: int
    """Those of them that are draft tokens."""

    @classmethod
    def choose(cls, counts: NDArray[np.int64], *, draft_vocab: int, kept: Collection[int] = ()) -> Self:
        """The tokens in `kept`, then the most frequent ones; of equally frequent ones the lower ids.

        Args:
            counts: [V] how often each target token is supervised.
            draft_vocab: D, the number of draft tokens.
            kept: target tokens that are draft tokens in any case.

        Raises:
            InputError: D is more than the target's vocabulary, or too small for `kept`.
        """
        if not len(kept) <= draft_vocab <= len(counts) or draft_vocab < 1:
            raise InputError(
                f"a draft vocabulary of {draft_vocab} tokens doesn't fit: it holds the {len(kept)} special "
                f"tokens, and the target's vocabulary has {len(counts)}"
            )
        first = np.zeros(len(counts), bool)
        first[list(kept)] = True
        order = np.lexsort((np.arange(len(counts)), -counts, ~first))
        chosen = np.sort(order[:draft_vocab])
        t2d = np.zeros(len(counts), bool)
        t2d[chosen] = True
        return cls(
            d2t=(chosen - np.arange(draft_vocab)).astype(np.int64),
            t2d=t2d,
            num_supervised=int(counts.sum()),
            num_covered=int(counts[chosen].sum()),
        )

    def save(self, out: Path) -> list[Path]:
        """Write the tables: to a `.pt` file as SpecForge reads it, else to a folder as speculators does.

        Returns:
            The files: `out` with a dictionary of `d2t` and `t2d`, or `d2t-<D>.npy` and `t2d-<D>.npy` in it.

        Raises:
            InputError: a file of that name is there.
        """
        names = [f"{name}-{len(self.d2t)}.npy" for name in ("d2t", "t2d")]
        files = [out] if out.suffix == ".pt" else [out / name for name in names]
        if there := [str(file) for file in files if file.exists()]:
            raise InputError(f"{', '.join(there)} exists; nothing is overwritten: name another place")
        files[0].parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".pt":
            import torch

            torch.save({"d2t": torch.from_numpy(self.d2t), "t2d": torch.from_numpy(self.t2d)}, out)
        else:
            for file, table in zip(files, (self.d2t, self.t2d), strict=True):
                np.save(file, table)
        return files


def count_supervised(
    source: str,
    *,
    target: str | None = None,
    revision: str | None = None,
    max_length: int = 4096,
    version: int | None = None,
    state: Path | None = None,
) -> tuple[NDArray[np.int64], set[int]]:
    """Count the supervised tokens of a root or of a dataset.

    Args:
        source: a root (path or `s3://…`), or a dataset as `layertap plan` takes it.
        target: hub id or folder; for a dataset, and for a root without a tokenizer.
        revision: of the target on the hub.
        max_length: tokens of a dataset's row that count; a root's rows are cut already.
        version: of a root; by default the newest complete one.
        state: folder of the embedded stack that holds the root.

    Returns:
        [V] counts by token id, and the ids of the target's special tokens.

    Raises:
        InputError: neither a root nor a dataset, no target for a dataset, or no tokenizer that loads.
        CatalogError: the root has no such version.
    """
    store = open_root(source, state)
    if store.exists(ROOT):
        counts = counts_of_version(HiddenStates(store, version=version))
    elif target is None:
        raise InputError(f"{source} is no root, and for a dataset the target is needed: give --target")
    else:
        dataset, vocab_size = TokenDataset.open(source), inspect_target(target, revision=revision).vocab_size
        counts = counts_of_dataset(dataset, vocab_size=vocab_size, max_length=max_length)
    special = special_tokens(target, revision=revision) if target else special_tokens_of_root(store)
    return counts, {k for k in special if k < len(counts)}  # a tokenizer may have tokens that its model lacks


def counts_of_version(states: HiddenStates) -> NDArray[np.int64]:
    """[V] how often each token is supervised in the stored rows of a version.

    The tokens are read from the plans, not from the states. A row counts as often as the dataset has it.
    """
    catalog = Catalog(states.store)
    counts = np.zeros(catalog.root().target["vocab_size"], np.int64)
    table = Versions(states.store).rows(states.version, ["extraction_key", "loss_mask", "file"])
    table = table.filter(table["file"].is_valid())
    keys, masks = keys_of(table["extraction_key"].combine_chunks()), table["loss_mask"]
    by_shard: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row, file in enumerate(table["file"].to_pylist()):
        by_shard[shard_of(str(file))].append(row)
    for (plan_id, shard), rows in by_shard.items():
        stored = catalog.shard_rows(plan_id, shard)
        at = {key.tobytes(): i for i, key in enumerate(stored.keys)}
        for row in rows:
            mask: Any = masks[row].values
            _count(counts, stored.tokens(at[keys[row].tobytes()]), None if mask is None else mask.to_numpy())
    return counts


def counts_of_dataset(dataset: TokenDataset, *, vocab_size: int, max_length: int) -> NDArray[np.int64]:
    """[V] how often each token is supervised in the rows that aren't refused, as far as they are kept."""
    counts = np.zeros(vocab_size, np.int64)
    num_tokens = dataset.scan(vocab_size=vocab_size, max_length=max_length).num_tokens
    for row in np.flatnonzero(num_tokens).tolist():
        end, mask = num_tokens[row], dataset.loss_mask(row)
        _count(counts, dataset.input_ids(row)[:end], None if mask is None else mask[:end])
    return counts


def _count(counts: NDArray[np.int64], tokens: NDArray[np.int32], mask: NDArray[np.uint8] | None) -> None:
    np.add.at(counts, tokens if mask is None else tokens[mask != 0], 1)


def special_tokens_of_root(store: Store) -> set[int]:
    """Special tokens of the tokenizer that lies in a root, under `target/`.

    Raises:
        TargetError: there is none that loads.
    """
    with tempfile.TemporaryDirectory() as folder:
        for info in store.list("target"):
            if not info.path.endswith(".safetensors"):
                (Path(folder) / Path(info.path).name).write_bytes(store.get(info.path))
        return special_tokens(folder, called=f"{store.uri}/target")


def special_tokens(target: str, *, revision: str | None = None, called: str | None = None) -> set[int]:
    """Special tokens of a target's tokenizer, and the ends of a text that its generation config names.

    Args:
        target: a hub id or a folder.
        revision: of the hub id.
        called: what errors call the target.

    Raises:
        TargetError: it has no tokenizer that loads.
    """
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(target, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise TargetError(
            f"no tokenizer can be loaded from {called or target}, so the special tokens aren't known: give "
            f"the target with --target ({error})"
        ) from error
    special = {k for k, token in tokenizer.added_tokens_decoder.items() if token.special}
    try:
        ends = GenerationConfig.from_pretrained(target, revision=revision or "main").eos_token_id
    except OSError:  # many targets have no such file
        ends = None
    special.update(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return special | set(tokenizer.all_special_ids)
