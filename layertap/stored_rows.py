"""Rows and batch files as their shard's index knows them, and whether bytes that were read are theirs. Pure.

Shapes: T tokens of a row, L layers, H hidden size.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from layertap.checksums import Buffer, crc64nvme
from layertap.keys import extraction_key
from layertap.records import Outcome
from layertap.spec import ExtractionSpec
from layertap.staging import BatchLayout


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """A row as its shard's index knows it."""

    key: bytes
    num_tokens: int
    offset: int
    nbytes: int
    crc64nvme: int


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A batch file of a committed shard."""

    path: str
    size: int
    checksum: str
    rows: tuple[StoredRow, ...]
    """All of them, in the order of the file."""

    drawn: tuple[StoredRow, ...]
    """Those of them that are looked at."""

    outcome: Outcome
    way_out: str


def wrong_header(data: Buffer, size: int, file: StoredFile, spec: ExtractionSpec) -> str | None:
    """What is wrong with a file's header, against the rows of the index; None if nothing is.

    Args:
        data: the file's bytes, at least those before its first row.
        size: bytes of the whole file.
        file: what the index knows of it.
        spec: the root's.
    """
    header_end = 8 + int.from_bytes(data[:8], "little")
    ends = [header_end, *(row.offset + row.nbytes for row in file.rows)]
    if len(data) < 8 or header_end > size:
        return f"the header ends at byte {header_end} of {size}"
    if ends != [*(row.offset for row in file.rows), size]:
        return f"the header ends at byte {header_end}, and rows don't fill what follows up to {size}"
    try:
        found = json.loads(bytes(data[8:header_end]))
    except ValueError as error:
        return f"the header is no JSON: {error}"
    expected = _layout(file, spec).entries()
    for name in expected.keys() | found.keys():
        if found.get(name) != expected.get(name):
            return f"the header says of {name} {found.get(name)}, where {expected.get(name)} is stored"
    return None


def _layout(file: StoredFile, spec: ExtractionSpec) -> BatchLayout:
    first = file.rows[0]
    return BatchLayout.of(
        [row.key.hex() for row in file.rows],
        [row.num_tokens for row in file.rows],
        spec=spec,
        hidden_size=_hidden_size(first, spec),
    )


def _hidden_size(row: StoredRow, spec: ExtractionSpec) -> int:
    return (row.nbytes // row.num_tokens - 4) // (spec.num_states * spec.item_bytes)


def states_of(row: StoredRow, data: Buffer, spec: ExtractionSpec) -> dict[str, Tensor]:
    """The [T, H] states of a row by name: `layer_<id>` for each layer, then `last_hidden_state` if stored."""
    hidden, num_layers = _hidden_size(row, spec), len(spec.layer_ids)
    values = torch.frombuffer(bytearray(data[: -4 * row.num_tokens]), dtype=getattr(torch, spec.dtype))
    layers_end = row.num_tokens * num_layers * hidden
    layers_TLH = values[:layers_end].view(row.num_tokens, num_layers, hidden)
    named = {f"layer_{k}": layers_TLH[:, i] for i, k in enumerate(spec.layer_ids)}
    if spec.stores_last:
        named["last_hidden_state"] = values[layers_end:].view(row.num_tokens, hidden)
    return named


def wrong_row(row: StoredRow, data: Buffer, spec: ExtractionSpec) -> str | None:
    """What is wrong with the bytes of a row; None if nothing is."""
    if len(data) != row.nbytes:
        return f"{len(data)} of {row.nbytes} bytes are there"
    if crc64nvme(data) != row.crc64nvme:
        return "its bytes don't have the CRC64NVME they were written with"
    if extraction_key(data[-4 * row.num_tokens :]) != row.key:
        return "its token ids aren't those of its extraction key"
    return next(_unlikely(states_of(row, data, spec)), None)


def _unlikely(states: dict[str, Tensor]) -> Iterator[str]:
    for name, state_TH in states.items():
        low, high = torch.aminmax(state_TH.float())
        if not (low.isfinite() and high.isfinite()):
            yield f"{name} isn't finite"
        elif low == high and state_TH.numel() > 1:
            yield f"{name} is {low.item():g} everywhere"
