"""Rows of `HiddenStates` made into a batch: packed one behind another, or padded to the longest.

Shapes: B rows of T1, T2, … tokens, N of them together, T the most; L layers, H hidden size.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["pack", "pad"]

Row = dict[str, Any]

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
    ends = lengths.cumsum(0)
    starts = torch.repeat_interleave(ends - lengths, lengths)
    return {
        **_copied(rows, (int(ends[-1]),), [slice(a, b) for a, b in pairwise([0, *ends.tolist()])]),
        "position_ids": torch.arange(len(starts)) - starts,
        "document_ids": torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), lengths),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
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
    tokens = torch.arange(int(lengths.max()))
    return {
        **_copied(rows, (len(rows), len(tokens)), [(k, slice(n)) for k, n in enumerate(lengths.tolist())]),
        "attention_mask": (tokens < lengths[:, None]).to(torch.int64),
        "row": _numbers(rows),
    }


def _copied(rows: Sequence[Row], shape: tuple[int, ...], places: Sequence[Any]) -> dict[str, Tensor]:
    """Each row at its place in zeros of this shape.

    numpy copies in the calling thread and without the GIL. Torch would start threads of its own in each of
    the threads that make batches, and they would wait for each other.
    """
    batch: dict[str, Tensor] = {}
    for name in PER_TOKEN:
        if name not in rows[0]:
            continue
        first: Tensor = rows[0][name]
        of_token = first[:1].reshape(-1).view(torch.uint8)
        into = np.zeros((*shape, len(of_token)), np.uint8)
        for row, place in zip(rows, places, strict=True):
            into[place] = row[name].reshape(len(row[name]), -1).view(torch.uint8).numpy()
        batch[name] = torch.from_numpy(into).view(first.dtype).view(*shape, *first.shape[1:])
    return batch


def _lengths(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([len(row["input_ids"]) for row in rows])


def _numbers(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row["row"] for row in rows])
