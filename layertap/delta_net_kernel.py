"""The Triton kernel of `layertap.delta_net`, which only a GPU host can import."""

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 8
"""Tokens of a tile."""

WARPS = 1
"""With tiles of 8 the fastest of 16 pairs on an H200, at 31 rows of 264 tokens and 546 of 15 alike."""


def launch(mixed_BTC: Tensor, weight: Tensor, query: Tensor, key: Tensor, value: Tensor, eps: float) -> None:
    """As `layertap.delta_net.convolve`, into contiguous outputs; channels lie side by side."""
    num_rows, num_tokens, num_key_heads, head_size = query.shape
    # neighbours in the grid are neighbours in memory
    grid = (mixed_BTC.shape[2] // head_size, triton.cdiv(num_tokens, TOKENS), num_rows)
    tokens = mixed_BTC.flatten(0, 1)
    _convolve[grid](
        tokens,
        weight,
        query,
        key,
        value,
        num_tokens,
        tokens.stride(0),
        eps,
        KEY_HEADS=num_key_heads,
        VALUE_HEADS=value.shape[2],
        SIZE=head_size,
        TAPS=weight.shape[1],
        BLOCK=TOKENS,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(
    mixed,
    weight,
    query,
    key,
    value,
    num_tokens,
    token_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row over BLOCK tokens; a stride not known to be a multiple of 16 makes loads narrow."""
    head = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    row_begin = tl.program_id(2).to(tl.int64) * num_tokens
    tokens = tl.arange(0, BLOCK)
    within = tl.arange(0, SIZE)
    begin = mixed + (row_begin + first) * token_stride + head * SIZE
    total = tl.zeros((BLOCK, SIZE), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = tokens + (tap - TAPS + 1)
        is_there = (first + source >= 0) & (first + source < num_tokens)
        places = begin + source[:, None] * token_stride + within[None, :]
        values = tl.load(places, mask=is_there[:, None], other=0.0).to(tl.float32)
        total += values * tl.load(weight + (head * SIZE + within) * TAPS + tap).to(tl.float32)[None, :]
    # rounded where transformers rounds: after the activation, and after the normalisation
    heads = (total * tl.sigmoid(total)).to(query.dtype.element_ty)
    place = row_begin + first + tokens
    is_token = (first + tokens < num_tokens)[:, None]
    if head >= 2 * KEY_HEADS:
        out = value + (place * VALUE_HEADS + (head - 2 * KEY_HEADS))[:, None] * SIZE + within[None, :]
        tl.store(out, heads, mask=is_token)
    else:
        wide = heads.to(tl.float32)
        heads = (wide * tl.rsqrt(tl.sum(wide * wide, axis=1) + eps)[:, None]).to(query.dtype.element_ty)
        out = query
        if head >= KEY_HEADS:
            out = key
        out += (place * KEY_HEADS + head % KEY_HEADS)[:, None] * SIZE + within[None, :]
        tl.store(out, heads, mask=is_token)
