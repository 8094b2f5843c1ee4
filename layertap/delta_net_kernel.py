"""The Triton kernel of `layertap.delta_net`, which only a GPU host can import."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16
"""Tokens of a tile."""


def launch(
    mixed_BTC: Tensor, weight: Tensor, first: int, num_heads: int, head_size: int, is_normed: bool, eps: float
) -> Tensor:
    """As `layertap.delta_net.convolve_heads`; channels lie side by side, tokens and rows any stride apart."""
    num_rows, num_tokens, _ = mixed_BTC.shape
    out = torch.empty(
        (num_rows, num_tokens, num_heads, head_size), dtype=mixed_BTC.dtype, device=mixed_BTC.device
    )
    grid = (num_rows, num_heads, triton.cdiv(num_tokens, TOKENS))
    _convolve_heads[grid](
        mixed_BTC,
        weight,
        out,
        num_tokens,
        mixed_BTC.stride(0),
        mixed_BTC.stride(1),
        eps,
        FIRST=first,
        HEADS=num_heads,
        SIZE=head_size,
        TAPS=weight.shape[1],
        NORMED=is_normed,
        BLOCK=TOKENS,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "row_stride"])
def _convolve_heads(
    mixed,
    weight,
    out,
    num_tokens,
    row_stride,
    token_stride,
    eps,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row over BLOCK tokens."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    within = tl.arange(0, SIZE)
    channels = FIRST + head * SIZE + within
    total = tl.zeros((BLOCK, SIZE), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = tokens + (tap - TAPS + 1)
        places = mixed + row * row_stride + source[:, None].to(tl.int64) * token_stride + channels[None, :]
        is_there = (source >= 0) & (source < num_tokens)
        values = tl.load(places, mask=is_there[:, None], other=0.0).to(tl.float32)
        total += values * tl.load(weight + channels * TAPS + tap).to(tl.float32)[None, :]
    # rounded where transformers rounds: after the activation, and after the normalisation
    heads = (total * tl.sigmoid(total)).to(out.dtype.element_ty)
    if NORMED:
        wide = heads.to(tl.float32)
        heads = (wide * tl.rsqrt(tl.sum(wide * wide, axis=1) + eps)[:, None]).to(out.dtype.element_ty)
    rows_of_out = (row * num_tokens + tokens[:, None]) * HEADS + head
    tl.store(out + rows_of_out * SIZE + within[None, :], heads, mask=(tokens < num_tokens)[:, None])
