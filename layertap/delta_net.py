"""The Gated DeltaNet block of Qwen3.5 with fewer passes over memory: what a compiler can't find by itself.

The four projections of the input become one matrix product; convolution, activation and normalisation one
kernel that reads what it wrote and leaves query, key and value as the delta rule wants them; the decay is
worked out inside fla's kernels.

Shapes: B rows, T tokens, K query and key heads, V value heads, D size of a head, C channels.
"""

import importlib.util
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from layertap.errors import TargetError

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
CACHES = ("cache", "cache_params", "past_key_values")
"""What transformers calls a block's cache, by version."""

L2NORM_EPS = 1e-6
"""As in fla and in transformers."""


def fuse_delta_nets(layers: nn.ModuleList) -> None:
    """Give each block that is built as Qwen3.5's its fused forward; the weights move side by side.

    On a GPU that forward is made of fla's kernels: where there is no fla, blocks stay as they are.
    """
    is_cuda = next(layers.parameters()).device.type == "cuda"
    if is_cuda and importlib.util.find_spec("fla") is None:
        return
    for block in layers.modules():
        if _is_known(block):
            _lay_side_by_side(block)
            block.forward = MethodType(_forward, block)


def is_fused(block: nn.Module) -> bool:
    """Whether this is a block with the fused forward."""
    return getattr(block.forward, "__func__", None) is _forward


def _is_known(block: Any) -> bool:
    """Whether the block is Qwen3.5's, not quantised, without biases, its heads of a size the kernel takes."""
    if not all(type(getattr(block, name, None)) is nn.Linear for name in (*PROJECTIONS, "out_proj")):
        return False
    has_biases = any(getattr(block, name).bias is not None for name in (*PROJECTIONS, "conv1d"))
    size = block.head_k_dim
    return (
        not has_biases and size == block.head_v_dim and size & (size - 1) == 0 and block.activation == "silu"
    )


def _lay_side_by_side(block: Any) -> None:
    projections = [getattr(block, name) for name in PROJECTIONS]
    block.projection_sizes = [len(projection.weight) for projection in projections]
    block.projection = nn.Parameter(torch.cat([p.weight for p in projections]), requires_grad=False)
    for projection, weight in zip(
        projections, torch.split(block.projection, block.projection_sizes), strict=True
    ):
        projection.weight = nn.Parameter(weight, requires_grad=False)


def refuse_caches(arguments: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of a block that has a cache among them.

    Raises:
        TargetError: there is one.
    """
    if any(arguments.get(name) is not None for name in CACHES):
        raise TargetError("a compiled target takes no cache")


def _forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """The block over whole rows, [B, T, H] to [B, T, H].

    Raises:
        TargetError: a cache or a mask, which an extraction has not.
    """
    refuse_caches(kwargs)
    if attention_mask is not None:
        raise TargetError("a compiled target takes no mask of padding")
    num_rows, num_tokens, _ = hidden_states.shape
    projected = torch.split(functional.linear(hidden_states, self.projection), self.projection_sizes, dim=-1)
    mixed_BTC, z_BTC, b_BTV, a_BTV = projected
    query, key, value = convolve(mixed_BTC, self.conv1d.weight.squeeze(1), self.num_k_heads, self.head_v_dim)
    out: Tensor = delta_rule(
        query, key, value, a_BTV.contiguous(), b_BTV.sigmoid().contiguous(), self.A_log, self.dt_bias
    )
    out = self.norm(out.reshape(-1, self.head_v_dim), z_BTC.reshape(-1, self.head_v_dim))
    projected_back: Tensor = self.out_proj(out.reshape(num_rows, num_tokens, -1))
    return projected_back


@torch.library.custom_op("layertap::convolve", mutates_args=())
def convolve(
    mixed_BTC: Tensor, weight: Tensor, num_key_heads: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal depthwise convolution and SiLU; query and key are normalised.

    Args:
        mixed_BTC: query, key and value, [B, T, C], tokens any stride apart.
        weight: [C, taps], the last one for the token itself.
        num_key_heads: K, of query and of key.
        head_size: D.

    Returns:
        Query, key [B, T, K, D] and value [B, T, V, D], each contiguous.
    """
    if mixed_BTC.device.type == "cuda":
        from layertap.delta_net_kernel import launch

        outputs = _outputs(mixed_BTC, num_key_heads, head_size)
        launch(mixed_BTC, weight, *outputs, L2NORM_EPS)
        return outputs
    num_taps, num_tokens = weight.shape[-1], mixed_BTC.shape[1]
    padded, taps = functional.pad(mixed_BTC, (0, 0, num_taps - 1, 0)).float(), weight.float()
    out = sum((padded[:, k : k + num_tokens] * taps[:, k] for k in range(num_taps)), padded.new_zeros(()))
    heads = functional.silu(out).to(mixed_BTC.dtype).reshape(*mixed_BTC.shape[:2], -1, head_size)
    query, key, value = heads.tensor_split((num_key_heads, 2 * num_key_heads), dim=2)
    return _normalised(query), _normalised(key), value.contiguous()


@convolve.register_fake
def _(mixed_BTC: Tensor, weight: Tensor, num_key_heads: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(mixed_BTC, num_key_heads, head_size)


def _outputs(mixed_BTC: Tensor, num_key_heads: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, yet to be filled."""
    num_heads = mixed_BTC.shape[-1] // head_size
    query, key, value = (
        mixed_BTC.new_empty((*mixed_BTC.shape[:2], count, head_size))
        for count in (num_key_heads, num_key_heads, num_heads - 2 * num_key_heads)
    )
    return query, key, value


def _normalised(heads: Tensor) -> Tensor:
    wide = heads.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPS)).to(heads.dtype).contiguous()


@torch.library.custom_op("layertap::gated_delta_rule_of_gate", mutates_args=())
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, a: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """The gated delta rule, [B, T, V, D], from normalised query and key and the raw decay `a` [B, T, V]."""
    if value.device.type == "cuda":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        gate = {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias}
        out: Tensor = chunk_gated_delta_rule(query, key, value, g=a, beta=beta, **gate)[0]
        return out
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias)
    # transformers 5.17 wants as many heads of query and key as of value
    query, key = (heads.repeat_interleave(value.shape[2] // heads.shape[2], 2) for heads in (query, key))
    out = torch_chunk_gated_delta_rule(query, key, value, g=decay, beta=beta)[0]
    return out.contiguous()


@delta_rule.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, a: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor
) -> Tensor:
    return value.new_empty(value.shape)
