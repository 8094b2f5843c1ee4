"""Decoder layers compiled by torch, one by one, with the kernels of a hybrid kept as they are.

Left to itself the tracer would replace fla's delta-rule kernel by transformers' slow reference, and lower the
depthwise convolution to one that can't keep up. So both become operators that the compiler leaves alone: the
delta rule that transformers chose, and fla's convolution, which reads what the projection wrote without a
transposed copy. Where there is no fla, the convolution is four shifted multiply-adds, which fuse.

Shapes: B rows, T tokens, K query and key heads, V value heads, D size of a head, C channels.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from layertap.attention import fuse_attention
from layertap.delta_net import fuse_delta_nets
from layertap.errors import TargetError

DELTA_RULE, CONVOLUTION = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"
"""What transformers calls them in the modules of its Gated DeltaNet models."""

MAX_VARIANTS = 4096
"""Compiled variants of all layers together; torch's own limit would send the deeper layers back to eager."""

delta_rules: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {}
"""What transformers chose before it was made opaque, by the name of the modeling module."""


def compile_layers(layers: nn.ModuleList) -> None:
    """Compile each layer's forward for any number of rows and tokens; the first batches take a while.

    Forward hooks on the layers themselves stay as they are. All models of this process that share the layers'
    code get the opaque kernels; blocks of Qwen3.5 get those of `layertap.delta_net` and `layertap.attention`.
    """
    _open_up(sys.modules[type(layers[0]).__module__], next(layers.parameters()).device)
    fuse_delta_nets(layers)
    fuse_attention(layers)
    for layer in layers:
        for inner in list(layer.modules())[1:]:
            inner._forward_hooks.clear()  # left by transformers' capture of outputs; they break the graph
        layer.forward = torch.compile(layer.forward, dynamic=True)


def allow_variants() -> None:
    """Let the calling thread compile as many variants as come: from torch 2.12 on each has its own limits."""
    config = torch._dynamo.config
    if config.recompile_limit != MAX_VARIANTS:
        config.recompile_limit = config.accumulated_recompile_limit = MAX_VARIANTS


def is_opened_up(modeling: Any) -> bool:
    """Whether the module runs its delta rule as one operator."""
    return getattr(getattr(modeling, DELTA_RULE, None), "func", None) is opaque_delta_rule


def _open_up(modeling: Any, device: torch.device) -> None:
    """Replace the delta rule and the convolution in the module that holds the layers' code."""
    if not hasattr(modeling, DELTA_RULE) or is_opened_up(modeling):
        return
    delta_rules[modeling.__name__] = getattr(modeling, DELTA_RULE)
    setattr(modeling, DELTA_RULE, partial(opaque_delta_rule, modeling.__name__))
    has_fla = device.type == "cuda" and importlib.util.find_spec("fla") is not None
    setattr(modeling, CONVOLUTION, fla_convolution if has_fla else shifted_convolution)


@torch.library.custom_op("layertap::gated_delta_rule", mutates_args=())
def _gated_delta_rule(
    modeling: str, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, is_normed: bool
) -> Tensor:
    out, _ = delta_rules[modeling](query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=is_normed)
    return out.contiguous()


@_gated_delta_rule.register_fake
def _(
    modeling: str, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, is_normed: bool
) -> Tensor:
    return value.new_empty(value.shape)


def opaque_delta_rule(
    modeling: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule over whole rows, as one operator that the compiler leaves alone.

    Args:
        modeling: name of the modeling module whose delta rule this is, in `delta_rules`.
        query: [B, T, K, D].
        key: [B, T, K, D].
        value: [B, T, V, D].
        g: decay, [B, T, V], float32.
        beta: [B, T, V].
        initial_state: of a cache, which an extraction has not.
        output_final_state: as well.
        use_qk_l2norm_in_kernel: whether query and key are normalised.
        cu_seqlens: of packed rows, which an extraction has not.

    Raises:
        TargetError: a cache or packed rows.
    """
    if initial_state is not None or output_final_state or cu_seqlens is not None:
        raise TargetError("a compiled target takes neither a cache nor packed rows")
    out: Tensor = _gated_delta_rule(modeling, query, key, value, g, beta, use_qk_l2norm_in_kernel)
    return out, None


@torch.library.custom_op("layertap::causal_convolution", mutates_args=())
def _causal_convolution(x_BTC: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    out: Tensor = causal_conv1d(x_BTC, weight, bias, activation=activation)[0]
    return out


@_causal_convolution.register_fake
def _(x_BTC: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    return x_BTC.new_empty(x_BTC.shape)


def fla_convolution(
    x_BCT: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """A causal depthwise convolution by fla's kernel, as one operator; arguments as `shifted_convolution`."""
    out: Tensor = _causal_convolution(x_BCT.transpose(1, 2), weight, bias, activation)
    return out.transpose(1, 2)


def shifted_convolution(
    x_BCT: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """A causal depthwise convolution as shifted multiply-adds in float32, which fuse with their surroundings.

    Args:
        x_BCT: [B, C, T].
        weight: [C, taps], the last one for the token itself.
        bias: [C].
        activation: `silu` or None.

    Raises:
        TargetError: another activation.
    """
    if activation not in (None, "silu"):
        raise TargetError(f"the convolution's activation {activation!r} can't be compiled, only silu")
    num_taps, num_tokens = weight.shape[-1], x_BCT.shape[-1]
    padded = functional.pad(x_BCT, (num_taps - 1, 0)).float()
    out = sum(padded[:, :, k : k + num_tokens] * weight[:, k, None].float() for k in range(num_taps))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias[:, None].float()
    return (functional.silu(out) if activation else out).to(x_BCT.dtype)
