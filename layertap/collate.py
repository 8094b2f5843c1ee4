"""Rows of `HiddenStates` made into a batch: packed one behind another, or padded to the longest.

Shapes: B rows of T1, T2, … tokens, N of them together, T the most; L layers, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        **{name: torch.cat([row[name] for row in rows]) for name in PER_TOKEN if name in rows[0]},
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
        **{
            name: pad_sequence([row[name] for row in rows], batch_first=True)
            for name in PER_TOKEN
            if name in rows[0]
        },
        "attention_mask": (tokens < lengths[:, None]).to(torch.int64),
        "row": _numbers(rows),
    }


def _lengths(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([len(row["input_ids"]) for row in rows])


def _numbers(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row["row"] for row in rows])
