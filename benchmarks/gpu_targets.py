"""A target of random weights, saved as a checkpoint.

python -m benchmarks.gpu_targets 27b FOLDER
"""

import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from layertap.bench.random_targets import build
from layertap.checkpoint import safetensors_header
from layertap.target_info import WEIGHTS_INDEX

FILE_BYTES = 2 << 30
FILES_AT_ONCE = 8


def save(shape: str, folder: Path, device: str) -> None:
    """Make a backbone and save it as the checkpoint of a causal language model, its head tied.

    `save_pretrained` writes with one thread, which takes minutes for 54 GB.

    Args:
        shape: a key of `layertap.bench.random_targets.SHAPES`.
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
