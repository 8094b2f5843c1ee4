"""Targets of the shapes that are measured, with random weights that are made on the device.

    python -m benchmarks.gpu_targets 27b FOLDER

saves one as a checkpoint. What a block adds to the residual stream is small beside the embedding: with
weights that are all alike, rounding is amplified layer by layer, and no lane would pass its self-check.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from layertap.checkpoint import safetensors_header
from layertap.target_info import WEIGHTS_INDEX

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

BRANCH_ENDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Matrices whose products are added to the residual stream."""

BRANCH_SIZE = 0.06

FILE_BYTES = 2 << 30
FILES_AT_ONCE = 8


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
        elif name.endswith(BRANCH_ENDS):
            parameter.normal_(0, BRANCH_SIZE / parameter.shape[1] ** 0.5)
        else:
            parameter.normal_(0, 1.0 if name.startswith("embed_tokens") else 0.02)
    return model


def save(shape: str, folder: Path, device: str) -> None:
    """Make a backbone and save it as the checkpoint of a causal language model, its head tied.

    `save_pretrained` writes with one thread, which takes minutes for 54 GB.

    Args:
        shape: a key of `LAYER_IDS`.
        folder: where to; made if it isn't there.
        device: where the weights are made.
    """
    model: Any = build(shape, device)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = ["Qwen3ForCausalLM" if shape == "8b" else "Qwen3_5ForCausalLM"]
    model.config.tie_word_embeddings = True
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    parts = list(_parts({f"model.{name}": tensor for name, tensor in model.state_dict().items()}))
    names = [f"model-{k + 1:05d}-of-{len(parts):05d}.safetensors" for k in range(len(parts))]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(_write, (folder / name for name in names), parts))
    where = {tensor: file for file, part in zip(names, parts, strict=True) for tensor in part}
    total = sum(tensor.nbytes for part in parts for tensor in part.values())
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in groups of about one file each."""
    part: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        part[name] = tensor
        if sum(tensor.nbytes for tensor in part.values()) >= FILE_BYTES:
            yield part
            part = {}
    if part:
        yield part


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        entries = {name: ("BF16", tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()}
        file.write(safetensors_header(entries))
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]), "cuda" if torch.cuda.is_available() else "cpu")
