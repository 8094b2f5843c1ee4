"""The gated attention of Qwen3.5 with one pass over query and key, which are normalised and rotated in it.

Left to the compiler, each value of a rotated head is worked out under a choice of branches, which takes seven
times what a copy of its bytes would.

Shapes: B rows, T tokens, N heads, D size of a head, R of it rotated.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from layertap.delta_net import refuse_caches

KNOWN = ("Qwen3_5Attention", "Qwen3_5RMSNorm")
"""Classes of transformers whose forward this is: the block's, and that of the norms of its heads."""


def fuse_attention(layers: nn.ModuleList) -> None:
    """Give each attention block that is built as Qwen3.5's its fused forward."""
    for block in layers.modules():
        if _is_known(block):
            block.forward = MethodType(_forward, block)


def is_fused(block: nn.Module) -> bool:
    """Whether this is a block with the fused forward."""
    return getattr(block.forward, "__func__", None) is _forward


def _is_known(block: Any) -> bool:
    if type(block).__name__ != KNOWN[0]:
        return False
    if block.config._attn_implementation == "eager":  # not among the functions that the forward chooses from
        return False
    norms = {type(block.q_norm).__name__, type(block.k_norm).__name__}
    return norms == {KNOWN[1]} and block.head_dim & (block.head_dim - 1) == 0


def _forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The block over whole rows, [B, T, H] to [B, T, H].

    Raises:
        TargetError: a cache, which an extraction has not.
    """
    refuse_caches(kwargs)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    of_heads, size = (*hidden_states.shape[:-1], -1), self.head_dim
    query, gate = self.q_proj(hidden_states).view(*of_heads, 2 * size).chunk(2, dim=-1)
    key = self.k_proj(hidden_states).view(*of_heads, size)
    value = self.v_proj(hidden_states).view(*of_heads, size)
    rotated = [
        normalise_and_rotate(heads, norm.weight, *position_embeddings, norm.eps)
        for heads, norm in ((query, self.q_norm), (key, self.k_norm))
    ]
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    by_head = [heads.transpose(1, 2) for heads in (*rotated, value)]
    out, weights = attend(self, *by_head, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
    out = out.reshape(*of_heads) * torch.sigmoid(gate.reshape(*of_heads))
    return self.o_proj(out), weights


@torch.library.custom_op("layertap::normalise_and_rotate", mutates_args=())
def normalise_and_rotate(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Root mean square norm of each head, its weight zero-centred, then the rotary embedding of R values.

    Args:
        heads: [B, T, N, D], tokens and heads any stride apart.
        weight: [D], the scale's distance from 1.
        cos: [B or 1, T, R].
        sin: as `cos`.
        eps: of the norm.

    Returns:
        [B, T, N, D], contiguous.
    """
    if heads.device.type == "cuda":
        from layertap.attention_kernel import launch

        return launch(heads, weight, cos, sin, eps)
    wide = heads.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())
    normed = normed.to(heads.dtype).float()
    rotary_size = cos.shape[-1]
    first, second = normed[..., :rotary_size].chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1) * sin[:, :, None].float()
    out = torch.cat(
        (normed[..., :rotary_size] * cos[:, :, None].float() + turned, normed[..., rotary_size:]), -1
    )
    return out.to(heads.dtype)


@normalise_and_rotate.register_fake
def _(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return heads.new_empty(heads.shape)
