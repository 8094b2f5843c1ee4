"""Targets of the shapes that are measured, with random weights that are made on the device."""

from typing import Any

import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

HYBRID = {
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
}
"""Gated DeltaNet hybrids: every fourth layer is full attention."""

DENSE_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

LAYER_IDS = {"27b": (1, 16, 31, 46, 61), "8b": (1, 9, 17, 25, 33), "tiny": (1, 3, 6)}


def build(shape: str, device: str) -> nn.Module:
    """The backbone of that shape, bfloat16.

    Args:
        shape: a key of `LAYER_IDS`.
        device: where its weights are made.
    """
    return _dense(device) if shape == "8b" else _hybrid(shape, device)


def _hybrid(shape: str, device: str) -> nn.Module:
    config = Qwen3_5TextConfig(
        **HYBRID[shape],
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10] if shape == "27b" else [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = modeling_qwen3_5.Qwen3_5TextModel(config)
    return _filled(model, modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(config), device)


def _dense(device: str) -> nn.Module:
    config = Qwen3Config(**DENSE_8B, max_position_embeddings=131072, rope_theta=1e6)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = modeling_qwen3.Qwen3Model(config)
    return _filled(model, modeling_qwen3.Qwen3RotaryEmbedding(config), device)


@torch.no_grad()
def _filled(model: Any, rotary: nn.Module, device: str) -> nn.Module:
    model = model.to(torch.bfloat16).to_empty(device=device)
    model.rotary_emb = rotary.to(device)
    is_hybrid = hasattr(model.layers[0], "linear_attn")
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.0, 2.0)
        elif name.endswith("dt_bias"):
            parameter.fill_(1.0)
        elif "norm" in name:
            # a hybrid's norms hold their scale's distance from 1, but for the gated one
            parameter.fill_(0.0 if is_hybrid and "linear_attn.norm" not in name else 1.0)
        else:
            parameter.normal_(0, 0.02)
    return model
