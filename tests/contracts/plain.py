"""The same rows by a plain Hugging Face forward pass, for the contracts to compare with."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOTS = Path(os.environ.get("CONTRACT_ROOTS", "build/contracts/roots"))
MODELS = ("llama", "hybrid")
COLUMNS = ("input_ids", "loss_mask", "layers", "pre_norm", "post_norm")

TOLERANCE = 1e-3
"""Noise of float32 in other shapes; the next layer, or the other norm, differs by about 1."""

LOSS_TOLERANCE = 1e-3


class Plain:
    """One target: its root, its exports, and its rows as Hugging Face computes them one by one."""

    def __init__(self, model: str) -> None:
        self.folder = ROOTS / model
        self.root = str(self.folder / "root")
        self.target = str(self.folder / "root" / "target")
        self._tensors = load_file(self.folder / "plain.safetensors")

    def __len__(self) -> int:
        return len(self._tensors) // len(COLUMNS)

    def row(self, i: int) -> dict[str, torch.Tensor]:
        """`input_ids` and `loss_mask` [T], `layers` [T, L * H], `pre_norm` and `post_norm` [T, H]."""
        return {name: self._tensors[f"{i}/{name}"] for name in COLUMNS}

    def loss_mask(self, i: int) -> torch.Tensor:
        """[T] of a row."""
        return self._tensors[f"{i}/loss_mask"]

    def num_tokens(self, i: int) -> int:
        """Tokens of a row."""
        return len(self._tensors[f"{i}/input_ids"])

    def assert_row(self, i: int, found: Mapping[str, Any]) -> None:
        """Compare what is given of `input_ids`, `loss_mask`, `layers`, `pre_norm` and `post_norm`."""
        for name, tensor in found.items():
            expected = self._tensors[f"{i}/{name}"]
            assert tensor.shape == expected.shape, name
            if name in ("input_ids", "loss_mask"):
                assert tensor.tolist() == expected.tolist(), name
            else:
                torch.testing.assert_close(tensor, expected, rtol=TOLERANCE, atol=TOLERANCE)


def assert_same_training(from_root: Sequence[float], from_files: Sequence[float]) -> None:
    """Losses of twenty steps on a root are finite, fall, and are those on files of plain forward passes."""
    assert len(from_root) == len(from_files) == 20 and all(map(math.isfinite, from_root))
    assert sum(from_root[-5:]) < sum(from_root[:5])
    assert max(abs(a - b) for a, b in zip(from_root, from_files, strict=True)) < LOSS_TOLERANCE
