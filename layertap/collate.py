"""Rows of `HiddenStates` made into a batch: packed one behind another, or padded to the longest.

Shapes: B rows of T1, T2, … tokens, N of them together, T the most; L layers, H hidden size.

All is computed by numpy, in the calling thread and without the GIL: torch would start threads of its own in
each of the threads that make batches, and they would wait for each other.
"""

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["pack", "pad"]

Row = dict[str, Any]

MAX_IDLE_BYTES = 1 << 30
"""What is kept of the memory of earlier batches, at most."""

PER_TOKEN = ("input_ids", "loss_mask", "hidden_states", "last_hidden_state")


def pack(rows: Sequence[Row]) -> dict[str, Any]:
    """One row behind another, without padding, for kernels of variable length.

    Returns:
        `input_ids` int32 [N], `loss_mask` uint8 [N], `hidden_states` [N, L, H] and, if stored,
        `last_hidden_state` [N, H]; `position_ids` int64 [N], from 0 in each row; `document_ids` int32 [N],
        the row of the batch that a token is of; `cu_seqlens` int32 [B + 1], where rows begin and the last one
        ends; `max_seqlen`, an int; `row` int64 [B], their numbers in the dataset.
    """
    lengths = _lengths(rows)
    ends = lengths.cumsum()
    starts = ends - lengths
    return {
        **_copied(rows, (int(ends[-1]),), [slice(a, b) for a, b in zip(starts, ends, strict=True)]),
        "position_ids": torch.from_numpy(np.arange(ends[-1]) - np.repeat(starts, lengths)),
        "document_ids": torch.from_numpy(np.repeat(np.arange(len(rows), dtype=np.int32), lengths)),
        "cu_seqlens": torch.from_numpy(np.append(0, ends).astype(np.int32)),
        "max_seqlen": int(lengths.max()),
        "row": _numbers(rows),
    }


def pad(rows: Sequence[Row]) -> dict[str, Any]:
    """Each row filled up at its end with zeros to the longest one.

    Returns:
        `input_ids` int32 [B, T], `loss_mask` uint8 [B, T], `hidden_states` [B, T, L, H] and, if stored,
        `last_hidden_state` [B, T, H]; `attention_mask` int64 [B, T], 0 where padded; `row` int64 [B], their
        numbers in the dataset.
    """
    lengths = _lengths(rows)
    tokens = np.arange(lengths.max())
    return {
        **_copied(
            rows,
            (len(rows), len(tokens)),
            [(k, slice(n)) for k, n in enumerate(lengths)],
            [(k, slice(n, None)) for k, n in enumerate(lengths)],
        ),
        "attention_mask": torch.from_numpy((tokens < lengths[:, None]).astype(np.int64)),
        "row": _numbers(rows),
    }


def _copied(
    rows: Sequence[Row], shape: tuple[int, ...], places: Sequence[Any], gaps: Sequence[Any] = ()
) -> dict[str, Tensor]:
    """Tensors of this shape with each row at its place, and zeros in the gaps between them."""
    batch: dict[str, Tensor] = {}
    for name in PER_TOKEN:
        if name not in rows[0]:
            continue
        first: Tensor = rows[0][name]
        of_token = first[:1].reshape(-1).view(torch.uint8)
        batch_bytes = _memory.take(math.prod(shape) * len(of_token)).view(*shape, len(of_token))
        into = batch_bytes.numpy()
        for row, place in zip(rows, places, strict=True):
            into[place] = row[name].reshape(len(row[name]), -1).view(torch.uint8).numpy()
        for gap in gaps:
            into[gap] = 0
        batch[name] = batch_bytes.view(first.dtype).view(*shape, *first.shape[1:])
    return batch


class _Memory:
    """Memory for batches, used again when nobody holds the batch any more.

    The system hands out large memory page by page and zeroed, which takes as long as copying the rows.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[NDArray[np.uint8]] = []
        self._lock = threading.RLock()  # a batch may be let go of in the midst of taking

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] that hold anything."""
        size = 1 << (nbytes - 1).bit_length()  # memory that is never written to takes none
        with self._lock:
            at = next((k for k, block in enumerate(self._idle) if len(block) == size), None)
            block = np.empty(size, np.uint8) if at is None else self._idle.pop(at)
        lent = block[:nbytes]
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent)  # which holds `lent` as long as any view of the tensor lives

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            if sum(map(len, self._idle)) + len(block) <= self._max_idle_bytes:
                self._idle.append(block)


_memory = _Memory(MAX_IDLE_BYTES)


def _lengths(rows: Sequence[Row]) -> NDArray[np.int64]:
    return np.array([len(row["input_ids"]) for row in rows])


def _numbers(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row["row"] for row in rows])
