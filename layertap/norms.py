"""The final norm of a target as numbers: its kind is found by trying, and applied to the bit.

Shapes: T tokens, H hidden size.
"""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

Kind = Literal["plain", "zero_centred"]
Order = Literal["cast_then_multiply", "multiply_then_cast"]

PROBE_DTYPES = (torch.bfloat16, torch.float32)
"""In float32 both orders give the same bits, so the kind is looked for in bfloat16 too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FinalNorm:
    """An RMS norm: `x * rsqrt(mean(x²) + eps)` in float32, times the scale.

    The scale is the weight, or 1 + weight if it is zero-centred. It is multiplied in the dtype of the states
    after casting to it (`cast_then_multiply`), or in float32 before that (`multiply_then_cast`).
    """

    kind: Kind
    order: Order
    eps: float

    weight: Tensor
    """[H], in the dtype in which the target ran it."""

    def __call__(self, x_TH: Tensor) -> Tensor:
        """States before the norm to states after it, [..., H]; bit-equal to the target's own module."""
        x = x_TH.float()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self.weight.to(x.device)
        if self.order == "multiply_then_cast":
            weight = weight.float()
        scale = 1.0 + weight if self.kind == "zero_centred" else weight
        if self.order == "multiply_then_cast":
            return (normed * scale).to(x_TH.dtype)
        return scale * normed.to(x_TH.dtype)

    @property
    def record(self) -> dict[str, Any]:
        """Everything but the weight, as JSON values."""
        dtype = str(self.weight.dtype).removeprefix("torch.")
        return {"kind": self.kind, "order": self.order, "eps": self.eps, "dtype": dtype}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], weight: Tensor) -> Self:
        """The inverse of `record`, with the checkpoint's weight [H]."""
        return cls(
            kind=record["kind"],
            order=record["order"],
            eps=record["eps"],
            weight=weight.to(getattr(torch, record["dtype"])),
        )


def identify_norm(module: nn.Module, weight: Tensor) -> FinalNorm | None:
    """Find out what a norm does by comparing bits with each form that is known here.

    Args:
        module: the target's final norm, on any device.
        weight: [H] of the checkpoint, which the module must have been loaded from.

    Returns:
        The norm, or None: no known form gives what the module gives.
    """
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    loaded = getattr(module, "weight", None)
    if not isinstance(eps, float) or not isinstance(loaded, Tensor):
        return None
    module, weight = copy.deepcopy(module).cpu(), weight.to(loaded.dtype)
    for kind, order in itertools.product(get_args(Kind), get_args(Order)):
        norm = FinalNorm(kind=kind, order=order, eps=eps, weight=weight)
        if all(_is_same(module, norm, dtype) for dtype in (*PROBE_DTYPES, loaded.dtype)):
            return norm
    return None


@torch.inference_mode()
def _is_same(module: nn.Module, norm: FinalNorm, dtype: torch.dtype) -> bool:
    """Whether both give the same bits on states of many sizes, all computed in `dtype`."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 3, 64)[:, None]
    x_TH = (torch.randn(64, len(norm.weight), generator=random) * sizes).to(dtype)
    theirs = copy.deepcopy(module).to(dtype)(x_TH)
    mine = FinalNorm(kind=norm.kind, order=norm.order, eps=norm.eps, weight=norm.weight.to(dtype))(x_TH)
    return torch.equal(mine, theirs)
