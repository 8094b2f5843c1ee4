"""Targets of the shapes that are measured, with random weights that are made on the device.

What a block adds to the residual stream is small beside the embedding: with weights that are all alike,
rounding is amplified layer by layer, and no lane would pass its self-check.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from layertap.errors import InputError

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "27b": {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Gated DeltaNet hybrids, where every fourth layer is full attention, and a dense one."""

LAYER_IDS = {"27b": (1, 16, 31, 46, 61), "8b": (1, 9, 17, 25, 33), "tiny": (1, 3, 6)}

BRANCH_ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Matrices whose products are added to the residual stream."""

BRANCH_SIZE = 0.06

GROUP = 4
"""Layers after which a hybrid's kinds of layer begin anew."""

WEIGHTS_SHARE = 0.7
"""Of a device's free memory; what is left is for a batch and its states."""


def build(shape: str, device: str | torch.device, num_layers: int | None = None) -> nn.Module:
    """The backbone of that shape, bfloat16. Its code is imported here: see `use_caches`.

    Args:
        shape: a key of `SHAPES`.
        device: where its weights are made.
        num_layers: decoder layers; as many as the shape has, if not given.
    """
    model: nn.Module
    model, rotary = _without_weights(shape, num_layers or SHAPES[shape]["num_hidden_layers"])
    model.to(torch.bfloat16).to_empty(device=device)
    model.rotary_emb = rotary.to(device)
    _fill(model)
    return model


def layers_that_fit(shape: str, free_bytes: int) -> int:
    """Decoder layers of a target of that shape for which a device has the memory, in whole groups.

    Args:
        shape: a key of `SHAPES`.
        free_bytes: of the device's memory.

    Raises:
        InputError: not even one group fits.
    """
    group, _ = _without_weights(shape, GROUP)
    of_layers, of_all = (_weight_bytes(module) for module in (group.layers, group))
    num_groups = (int(WEIGHTS_SHARE * free_bytes) - (of_all - of_layers)) // of_layers
    if num_groups < 1:
        raise InputError(
            f"{GROUP} layers of the {shape} shape need {of_all / WEIGHTS_SHARE / 2**30:.1f} GiB, and "
            f"{free_bytes / 2**30:.1f} GiB are free on the device: free some, or take a larger one"
        )
    of_shape: int = SHAPES[shape]["num_hidden_layers"]
    return min(of_shape, GROUP * num_groups)


def _weight_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters()) * torch.bfloat16.itemsize


def _without_weights(shape: str, num_layers: int) -> tuple[Any, nn.Module]:
    """The backbone on the meta device, and its rotary embedding, which has numbers."""
    sizes = {**SHAPES[shape], "num_hidden_layers": num_layers}
    return (_hybrid if "linear_num_key_heads" in sizes else _dense)(sizes)


def _hybrid(sizes: dict[str, Any]) -> tuple[Any, nn.Module]:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **sizes,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10] if sizes["head_dim"] == 256 else [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = modeling.Qwen3_5TextModel(config)
    return model, modeling.Qwen3_5TextRotaryEmbedding(config)


def _dense(sizes: dict[str, Any]) -> tuple[Any, nn.Module]:
    from transformers.models.qwen3 import modeling_qwen3 as modeling
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(**sizes, max_position_embeddings=131072, rope_parameters=rope)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = modeling.Qwen3Model(config)
    return model, modeling.Qwen3RotaryEmbedding(config)


@torch.no_grad()
def _fill(model: Any) -> None:
    is_hybrid = hasattr(model.layers[0], "linear_attn")
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.0, 2.0)
        elif name.endswith("dt_bias"):
            parameter.fill_(1.0)
        elif "norm" in name:
            # a hybrid's norms hold their scale's distance from 1, but for the gated one
            parameter.fill_(0.0 if is_hybrid and "linear_attn.norm" not in name else 1.0)
        elif name.endswith(BRANCH_ENDS):
            parameter.normal_(0, BRANCH_SIZE / parameter.shape[1] ** 0.5)
        else:
            parameter.normal_(0, 1.0 if name.startswith("embed_tokens") else 0.02)
