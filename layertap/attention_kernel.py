"""The Triton kernel of `layertap.attention`, which only a GPU host can import."""

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 4
"""Tokens of a tile."""

WARPS = 1
"""With tiles of 4 the fastest of 9 pairs on an H200: 31 rows of 264 tokens take half of what a copy would."""


def launch(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """As `layertap.attention.normalise_and_rotate`; values of a head lie side by side."""
    num_rows, num_tokens, num_heads, head_size = heads.shape
    out = heads.new_empty(heads.shape)
    tokens = heads.flatten(0, 1)
    cos, sin = cos.contiguous(), sin.contiguous()
    _normalise_and_rotate[(num_heads, triton.cdiv(num_tokens, TOKENS), num_rows)](
        tokens,
        weight,
        cos,
        sin,
        out,
        num_tokens,
        tokens.stride(0),
        tokens.stride(1),
        0 if len(cos) == 1 else num_tokens,
        eps,
        HEADS=num_heads,
        SIZE=head_size,
        ROTARY=cos.shape[-1],
        BLOCK=TOKENS,
        num_warps=WARPS,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "angles_a_row"])
def _normalise_and_rotate(
    heads,
    weight,
    cos,
    sin,
    out,
    num_tokens,
    token_stride,
    head_stride,
    angles_a_row,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row over BLOCK tokens."""
    head, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    tokens = tl.arange(0, BLOCK)
    within = tl.arange(0, SIZE)
    is_token = (first + tokens < num_tokens)[:, None]
    is_rotated = (within < ROTARY)[None, :]
    # value k is rotated with the one half of ROTARY away
    partner = tl.where(within < ROTARY // 2, within + ROTARY // 2, within - ROTARY // 2)
    sign = tl.where(within < ROTARY // 2, -1.0, 1.0)

    begin = heads + (row * num_tokens + first) * token_stride + head * head_stride
    places = begin + tokens[:, None] * token_stride
    dtype = out.dtype.element_ty
    x = tl.load(places + within[None, :], mask=is_token, other=0.0).to(tl.float32)
    y = tl.load(places + partner[None, :], mask=is_token & is_rotated, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    # rounded after norm and rotation; transformers rounds the two products of the rotation as well
    x = (x * scale * (1.0 + tl.load(weight + within).to(tl.float32))[None, :]).to(dtype).to(tl.float32)
    of_partner = tl.load(weight + partner, mask=within < ROTARY, other=0.0).to(tl.float32)
    y = (y * scale * (1.0 + of_partner)[None, :]).to(dtype).to(tl.float32)

    angles = ((row * angles_a_row + first) + tokens)[:, None] * ROTARY + within[None, :]
    c = tl.load(cos + angles, mask=is_token & is_rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + angles, mask=is_token & is_rotated, other=0.0).to(tl.float32)
    place = ((row * num_tokens + first + tokens) * HEADS + head)[:, None] * SIZE + within[None, :]
    tl.store(out + place, (x * c + sign[None, :] * y * s).to(dtype), mask=is_token)
