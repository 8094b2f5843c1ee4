"""DeepSpec's target cache: shards of raw tensors, an index of fixed records, and a manifest."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.errors import CatalogError
from layertap.trainers.layouts import FILE_OVERHEAD_BYTES, Layout, OutFile, write_json
from layertap.trainers.rows import Needs, TrainerRow, TrainerRows

SHARD_BYTES = 4 << 30
"""What is lost by a kill at most; DeepSpec itself writes shards of up to 64 GiB."""

RECORD = struct.Struct("<QIIQQQQQ")
"""Sample, shard, tokens, and where its five tensors begin in the shard."""


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where DeepSpec's rows go."""

    shard: NDArray[np.int64]
    """[rows] number of the shard."""

    offset: NDArray[np.int64]
    """[rows] where the row begins in it."""

    nbytes: NDArray[np.int64]
    """[rows]."""


class DeepSpecFiles(Layout):
    """`shard-<k>.bin` with raw tensors, `samples.idx` with their places, and a manifest.

    Args:
        target_model: what the training config calls the target.
        shard_bytes: of a shard at most, but for a single larger row.
    """

    needs = Needs(trainer="DeepSpec", last="post_norm")

    def __init__(self, *, target_model: str, shard_bytes: int = SHARD_BYTES) -> None:
        self.target_model = target_model
        self.shard_bytes = shard_bytes

    def files(self, rows: TrainerRows) -> Iterator[OutFile]:
        """Shards, and the index."""
        if rows.states.spec.dtype != "bfloat16":
            raise CatalogError(
                f"DeepSpec's files hold bfloat16, but {rows.states.store.uri} holds "
                f"{rows.states.spec.dtype}: extract into another root with --dtype bfloat16"
            )
        places = self._places(rows)
        starts = np.flatnonzero(np.diff(places.shard, prepend=-1)).tolist()
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(rows)], strict=True)):
            nbytes = int(places.nbytes[start:end].sum()) + FILE_OVERHEAD_BYTES
            yield OutFile(name=_shard(number), nbytes=nbytes, rows=range(start, end))
        yield OutFile(name="samples.idx", nbytes=RECORD.size * len(rows) + FILE_OVERHEAD_BYTES)

    def _places(self, rows: TrainerRows) -> _Places:
        nbytes = _part_bytes(rows).sum(axis=1)
        shard, offset = np.zeros(len(nbytes), np.int64), np.zeros(len(nbytes), np.int64)
        number = size = 0
        for i, n in enumerate(nbytes.tolist()):
            if size and size + n > self.shard_bytes:
                number, size = number + 1, 0
            shard[i], offset[i] = number, size
            size += n
        return _Places(shard=shard, offset=offset, nbytes=nbytes)

    def write(self, rows: TrainerRows, file: OutFile, path: Path) -> None:
        """A shard, or the index."""
        with path.open("wb") as out:
            if not file.rows:
                out.writelines(self._records(rows))
            for i in file.rows:
                out.writelines(_parts(rows[i]))

    def _records(self, rows: TrainerRows) -> Iterator[bytes]:
        places, parts = self._places(rows), _part_bytes(rows)
        offsets = places.offset[:, None] + np.cumsum(parts, axis=1) - parts
        for i, num_tokens in enumerate(rows.num_tokens.tolist()):
            yield RECORD.pack(i, places.shard[i], num_tokens, *offsets[i].tolist())

    def finish(self, rows: TrainerRows, folder: Path) -> None:
        """The manifest."""
        num_shards = int(self._places(rows).shard[-1]) + 1
        write_json(
            folder / "manifest.json",
            {
                "version": 2,
                "num_samples": len(rows),
                "num_shards": num_shards,
                "target_layer_ids": list(rows.states.layer_ids),
                "hidden_dtype": "bfloat16",
                "token_dtype": "int32",
                "mask_dtype": "uint8",
                "index_record_size": RECORD.size,
                "hidden_size": rows.states.hidden_size,
                "shards": [{"shard_id": k, "file_name": _shard(k)} for k in range(num_shards)],
                "target_model_name_or_path": self.target_model,
                "max_length": rows.states.spec.max_length,
            },
        )


def _shard(number: int) -> str:
    return f"shard-{number:05d}.bin"


def _part_bytes(rows: TrainerRows) -> NDArray[np.int64]:
    """[rows, 5] bytes of a row's tensors."""
    state_bytes = 2 * rows.states.hidden_size
    token_bytes = np.array([4, 1, 1, len(rows.states.layer_ids) * state_bytes, state_bytes])
    found: NDArray[np.int64] = rows.num_tokens[:, None].astype(np.int64) * token_bytes
    return found


def _parts(row: TrainerRow) -> Iterator[bytes]:
    assert row.last is not None
    mask = row.loss_mask.to(torch.uint8)
    tensors: list[Tensor] = [row.input_ids.int(), torch.ones_like(mask), mask, row.layers, row.last]
    for tensor in tensors:
        yield tensor.contiguous().view(torch.uint8).numpy().tobytes()
