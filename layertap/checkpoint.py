"""Tensors of a checkpoint on disk, found by what they are and read as raw bytes, never whole in memory."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layertap.checksums import CHUNK_BYTES
from layertap.target_info import WEIGHTS_INDEX, Backbone


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: Path
    name: str

    dtype: str
    """As safetensors writes it: `BF16`, `F32`, …"""

    shape: tuple[int, ...]

    start: int
    """Offset of its first byte in the file."""

    nbytes: int

    def chunks(self) -> Iterator[bytes]:
        """A safetensors file of this tensor alone."""
        yield safetensors_header({self.name: (self.dtype, self.shape, self.nbytes)})
        with self.file.open("rb") as file:
            for at in range(0, self.nbytes, CHUNK_BYTES):
                yield os.pread(file.fileno(), min(CHUNK_BYTES, self.nbytes - at), self.start + at)


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """What stands before the data of a safetensors file; data begins at a multiple of 64.

    Args:
        tensors: by name, in the order of the data: dtype as safetensors writes it, shape, bytes.
    """
    entries, end = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % 64)
    return len(header).to_bytes(8, "little") + header


class Checkpoint:
    """The safetensors files of a target's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / WEIGHTS_INDEX
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
        files = [folder / name for name in sorted(names or {"model.safetensors"})]
        self._tensors = {tensor.name: tensor for file in files for tensor in _tensors_of(file)}

    def get(self, name: str) -> StoredTensor | None:
        """The tensor of that name."""
        return self._tensors.get(name)

    def decoder_prefix(self, layers_name: str, num_layers: int) -> str:
        """What the names of the decoder's tensors begin with, such as `model.` or `model.language_model.`.

        Another stack of layers in the same checkpoint (a vision tower, a multi-token head) has another number
        of layers; layers for multi-token prediction may follow the decoder's own. Empty if there are none.
        """
        layers: dict[str, set[int]] = defaultdict(set)
        pattern = re.compile(rf"(|.*\.){re.escape(layers_name)}\.(\d+)\.")
        for name in self._tensors:
            if match := pattern.match(name):
                layers[match[1]].add(int(match[2]))
        own = set(range(num_layers))
        found = [prefix for prefix, numbers in layers.items() if numbers >= own]
        return min(found, key=lambda prefix: (layers[prefix] != own, len(prefix)), default="")

    def head(self, name: str, decoder_prefix: str) -> StoredTensor | None:
        """The output head: its module's name in the model, or that name below a wrapper's prefix.

        A head beside it, for multi-token prediction, lies below a prefix that isn't the decoder's.
        """
        prefixes = ["", *(decoder_prefix[: dot.end()] for dot in re.finditer(r"\.", decoder_prefix))]
        return next((self._tensors[p + name] for p in prefixes if p + name in self._tensors), None)


def _tensors_of(file: Path) -> list[StoredTensor]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: Mapping[str, Any] = json.loads(opened.read(length))
    return [
        StoredTensor(
            file=file,
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=8 + length + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]


def embedding_name(backbone: Backbone) -> str:
    """The input embedding's name within the decoder, such as `embed_tokens`."""
    embedding: Any = backbone.module.get_input_embeddings()  # type: ignore[operator]
    names = (name for name, module in backbone.module.named_modules() if module is embedding)
    return str(next(names))


def head_names(model: Any) -> Sequence[str]:
    """Names of the model's output head; none for a model without one."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head and head is not None]
