"""Rows as trainers take them: flat layers, the last state before or after the norm, or why that can't be.

Shapes: T tokens of a row, L layers, H hidden size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from layertap.errors import CatalogError
from layertap.norms import FinalNorm
from layertap.reader import HiddenStates
from layertap.store import Store
from layertap.target_files import TargetFiles
from layertap.versions import Versions

Last = Literal["pre_norm", "post_norm"]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a trainer can't do without."""

    trainer: str
    """What people call it."""

    last: Last | None
    """Which last hidden state it reads; None: it reads none."""

    num_layers: int | None = None
    """How many layers it takes; None: any number."""

    wants_pair: bool = False
    """Whether it refuses a row without two supervised tokens in succession."""

    max_tokens: int | None = None
    """Tokens at which it cuts a row before it looks for those two; None: it takes whole rows."""


@dataclass(frozen=True, kw_only=True)
class TrainerRow:
    """One row in the terms of trainers."""

    input_ids: Tensor
    """int64 [T]."""

    loss_mask: Tensor
    """int64 [T]."""

    layers: Tensor
    """[T, L, H] in the stored dtype."""

    last: Tensor | None
    """[T, H] in the stored dtype, before or after the norm as the trainer wants it."""


class TrainerRows:
    """The stored rows of a version that a trainer can take, in the dataset's order.

    Args:
        states: the version.
        needs: what the trainer can't do without.

    Raises:
        CatalogError: the root lacks what the trainer needs; says what, and the way out.
    """

    def __init__(self, states: HiddenStates, needs: Needs) -> None:
        self.states = states
        self.needs = needs
        self._norm = _choose_norm(states, needs)
        num_layers = len(states.layer_ids)
        if needs.num_layers not in (None, num_layers):
            raise CatalogError(
                f"{needs.trainer} takes {needs.num_layers} layers, but {states.store.uri} holds {num_layers} "
                f"({', '.join(map(str, states.layer_ids))}): extract those into a root of their own"
            )
        self.chosen = np.arange(len(states))
        if needs.wants_pair:
            self.chosen = np.flatnonzero(self.has_pair(needs.max_tokens or states.spec.max_length))
        if not len(self.chosen):
            raise CatalogError(f"{states.store.uri} holds no row that {needs.trainer} could train on")

    @property
    def num_left_out(self) -> int:
        """Stored rows that the trainer would refuse for want of supervised tokens."""
        return len(self.states) - len(self.chosen)

    @property
    def num_tokens(self) -> NDArray[np.int32]:
        """[len(self)] tokens of each row."""
        return self.states.num_tokens[self.chosen]

    def has_pair(self, max_tokens: int) -> NDArray[np.bool_]:
        """[len(self)] whether two in succession of a row's first `max_tokens` tokens are supervised."""
        masks: Any = self.lines(["loss_mask"])["loss_mask"]
        per_chunk = [_pairs(chunk, max_tokens) for chunk in masks.chunks]
        has_two = np.minimum(self.num_tokens, max_tokens) > 1  # for rows without a mask
        return np.where(masks.is_valid(), np.concatenate([np.empty(0, np.bool_), *per_chunk]), has_two)

    def lines(self, columns: list[str]) -> pa.Table:
        """[len(self)] what the version's table says of each row."""
        table = Versions(self.states.store).rows(self.states.version, columns)
        is_chosen = np.zeros(len(table), np.bool_)
        is_chosen[self.states.rows[self.chosen]] = True
        return table.filter(is_chosen)  # `take` makes one chunk of masks, and that holds 2^31 values at most

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> TrainerRow:
        """The i-th row of those that the trainer can take; raises as `HiddenStates`."""
        row = self.states[int(self.chosen[i])]
        last = row["last_hidden_state"] if self.needs.last else None
        return TrainerRow(
            input_ids=row["input_ids"].long(),
            loss_mask=row["loss_mask"].long(),
            layers=row["hidden_states"],
            last=self._norm(last) if self._norm and last is not None else last,
        )


def open_rows(root: Store | str | Path, needs: Needs, *, version: int | None = None) -> TrainerRows:
    """The rows of a root for a trainer; raises as `HiddenStates` and `TrainerRows`."""
    return TrainerRows(HiddenStates(root, version=version), needs)


def _choose_norm(states: HiddenStates, needs: Needs) -> FinalNorm | None:
    """What makes the stored last state the one that the trainer wants; None: it is that one."""
    stored = states.last_hidden_state
    if needs.last is None or stored == needs.last:
        return None
    if stored == "none":
        raise CatalogError(
            f"{needs.trainer} needs the last hidden state, and {states.store.uri} holds none: extract into "
            "another root with --last-hidden-state pre_norm, which is the default"
        )
    if needs.last == "pre_norm":
        raise CatalogError(
            f"{needs.trainer} applies the final norm itself and needs the state before it, but "
            f"{states.store.uri} holds the one after it, which can't be undone: extract into another root "
            "with --last-hidden-state pre_norm"
        )
    return TargetFiles(states.store).final_norm()


def _pairs(masks: Any, max_tokens: int) -> NDArray[np.bool_]:
    """[rows] whether a mask, cut there, has two ones in succession; False where it is null."""
    offsets = masks.offsets.to_numpy()
    values = masks.values.to_numpy()[offsets[0] : offsets[-1]]
    ends = offsets - offsets[0]
    before: NDArray[np.int64] = np.zeros(len(values) + 1, np.int64)
    before[2:] = np.cumsum((values[1:] != 0) & (values[:-1] != 0))  # pairs that end before each place
    starts, stops = ends[:-1], np.minimum(ends[1:], ends[:-1] + max_tokens)
    found: NDArray[np.bool_] = before[stops] > before[np.minimum(starts + 1, stops)]
    return found
