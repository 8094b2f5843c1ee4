"""A target whose forward pass costs nothing but gives states, and rows for it: what is left is the engine."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.keys import KEY_BYTES
from layertap.plan import Plan, PlanSettings, make_plan
from layertap.records import ShardRows
from layertap.spec import ExtractionSpec
from layertap.target import Target

HIDDEN_SIZE, VOCAB_SIZE = 5120, 248_320
MEAN_LENGTH, MAX_LENGTH = 264, 4096

SPEC = ExtractionSpec(
    target_identity="benchmark",
    layer_ids=(1, 16, 31, 46, 61),
    last_hidden_state="pre_norm",
    max_length=MAX_LENGTH,
)
"""Five layers of 5120 and the last state in bf16: 61,440 bytes a token, and 4 for its id."""


@dataclass(frozen=True)
class _Info:
    hidden_size: int = HIDDEN_SIZE


NUM_SLOTS = 4
"""As a lane of the headline job has."""


class NullTarget:
    """What an extractor asks of a target, answered from memory that was filled once.

    Args:
        max_positions: rows times longest row of the largest batch.
    """

    spec = SPEC
    info = _Info()
    device = torch.device("cpu")

    def __init__(self, max_positions: int) -> None:
        num_states = len(SPEC.layer_ids) + 1
        random = torch.Generator().manual_seed(0)
        one_state = torch.randn(max_positions, HIDDEN_SIZE, generator=random, dtype=torch.bfloat16)
        self._states = [one_state.roll(k) for k in range(num_states)]

    def tap(self, ids_BT: Tensor) -> list[Tensor]:
        """[B, T, H] for each layer and the last state: views, always of the same values."""
        return [state[: ids_BT.numel()].view(*ids_BT.shape, HIDDEN_SIZE) for state in self._states]

    @classmethod
    def made(cls, max_positions: int) -> Target:
        """A null target where a target is expected."""
        return cast(Target, cls(max_positions))


def drawn_lengths(num_rows: int, random: np.random.Generator) -> NDArray[np.int32]:
    """[num_rows] log-normal lengths with the mean of the headline job, spread as in real chats."""
    shape = random.lognormal(0, 1.1, num_rows)
    low, high = 1.0, float(MAX_LENGTH)
    while high - low > 0.01:
        scale = (low + high) / 2
        lengths = np.clip(shape * scale, 1, MAX_LENGTH).astype(np.int32)
        low, high = (scale, high) if lengths.mean() < MEAN_LENGTH else (low, scale)
    return lengths


def planned(num_rows: int, settings: PlanSettings) -> Plan:
    """A plan over so many rows of drawn lengths."""
    random = np.random.default_rng(0)
    keys = random.integers(0, 256, (num_rows, KEY_BYTES), np.uint8)
    lengths = drawn_lengths(num_rows, random)
    return make_plan(keys, lengths, spec_fingerprint=SPEC.fingerprint, settings=settings)


def rows_of(lengths: list[list[int]]) -> ShardRows:
    """A shard of random tokens, from the lengths of each batch's rows."""
    random = np.random.default_rng(0)
    flat = [n for batch in lengths for n in batch]
    number = np.repeat(np.arange(len(lengths), dtype=np.int32), [len(batch) for batch in lengths])
    keys = random.integers(0, 256, (len(flat), KEY_BYTES), np.uint8)
    return ShardRows.of(keys, number, [random.integers(0, VOCAB_SIZE, n, np.int32) for n in flat])
