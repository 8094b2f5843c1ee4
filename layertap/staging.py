"""Where a batch lies in its file, and the host memory in which it becomes one.

A batch is written as one safetensors file, row by row: `<key>/hidden_states` [T, L, H],
`<key>/last_hidden_state` [T, H] unless the spec stores none, `<key>/input_ids` [T] int32. So a row is one
range of bytes. The header is padded with spaces to a size that is known before the forward pass and stays
when rows are dropped: the bytes of a slot are the finished file, never copied into another.

Shapes: B rows, T tokens of the longest row, L layers, H hidden size.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.spec import FORMAT_VERSION, DTypeName, ExtractionSpec

LAYER_ID_CONVENTION = "id k is the output of decoder layer k, 0-based: Hugging Face hidden_states[k + 1]"

PUT_S = 1.0
"""Seconds that a store may take for a batch, or stall, before the device waits for it."""

MAX_SLOTS = 16
"""A small target makes more batches in that time; each slot has a thread of the store's."""

DATA_ALIGNMENT = 64
HEADER_BYTES_A_ROW = 512
"""More than the header entries of one row ever take."""
HEADER_BYTES = 4096
"""More than the rest of the header takes."""

_SAFETENSORS_DTYPE: dict[DTypeName, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_WORD = {2: torch.int16, 4: torch.int32}
"""States travel as integers of their size: no kernel may touch their bits."""


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The file of one batch: which rows it holds, in order, and where each lies. Pure."""

    spec: ExtractionSpec
    hidden_size: int
    keys: tuple[str, ...]
    """Extraction keys in hex."""

    num_tokens: tuple[int, ...]
    data_offset: int
    """Where the first row begins, a multiple of 64."""

    @classmethod
    def of(
        cls, keys: Sequence[str], num_tokens: Sequence[int], *, spec: ExtractionSpec, hidden_size: int
    ) -> Self:
        """Lay out the given rows."""
        layout = cls(
            spec=spec, hidden_size=hidden_size, keys=tuple(keys), num_tokens=tuple(num_tokens), data_offset=0
        )
        header_nbytes = 8 + len(layout._header_json())
        return replace(layout, data_offset=-(-header_nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT)

    @cached_property
    def nbytes(self) -> list[int]:
        """Bytes of each row."""
        bytes_per_token = self.spec.bytes_per_token(self.hidden_size)
        return [n * bytes_per_token for n in self.num_tokens]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each row begins in the file, in bytes."""
        ends = np.cumsum([self.data_offset, *self.nbytes])
        return [int(k) for k in ends[:-1]]

    @property
    def data_nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(self.nbytes)

    @property
    def file_nbytes(self) -> int:
        """Bytes of the file."""
        return self.data_offset + self.data_nbytes

    def without(self, dropped: Collection[int]) -> Self:
        """The same file without some rows; the others keep their order, the data its offset."""
        kept = [i for i in range(len(self.keys)) if i not in dropped]
        return replace(
            self, keys=tuple(self.keys[i] for i in kept), num_tokens=tuple(self.num_tokens[i] for i in kept)
        )

    def header(self) -> bytes:
        """The first `data_offset` bytes of the file."""
        text = self._header_json().ljust(self.data_offset - 8)
        return len(text).to_bytes(8, "little") + text.encode()

    def _header_json(self) -> str:
        return json.dumps(self.entries(), separators=(",", ":"))

    def entries(self) -> dict[str, Any]:
        """What the header says: dtype, shape and place of each tensor by its name, and `__metadata__`."""
        entries: dict[str, Any] = {"__metadata__": self._metadata()}
        dtype, width = _SAFETENSORS_DTYPE[self.spec.dtype], self.hidden_size * self.spec.item_bytes
        begin = 0
        for key, tokens in zip(self.keys, self.num_tokens, strict=True):
            pieces = [
                ("hidden_states", dtype, [tokens, len(self.spec.layer_ids), self.hidden_size]),
                ("last_hidden_state", dtype, [tokens, self.hidden_size]),
                ("input_ids", "I32", [tokens]),
            ]
            sizes = [tokens * len(self.spec.layer_ids) * width, tokens * width, tokens * 4]
            for (name, of, shape), size in zip(pieces, sizes, strict=True):
                if name == "last_hidden_state" and not self.spec.stores_last:
                    continue
                entries[f"{key}/{name}"] = {
                    "dtype": of,
                    "shape": shape,
                    "data_offsets": [begin, begin + size],
                }
                begin += size
        return entries

    def _metadata(self) -> dict[str, str]:
        return {
            "format_version": FORMAT_VERSION,
            "spec_fingerprint": self.spec.fingerprint,
            "layer_ids": json.dumps(self.spec.layer_ids),
            "layer_id_convention": LAYER_ID_CONVENTION,
            "last_hidden_state": self.spec.last_hidden_state,
            "num_rows": str(len(self.keys)),
            "keys_order": "file",
        }


def slots_for(max_batch_bytes: int, *, bytes_per_s: float) -> int:
    """How many slots a lane has: two for batches queued on the device, the rest on their way to the store.

    Args:
        max_batch_bytes: as in `slot_nbytes`.
        bytes_per_s: what the device makes.
    """
    on_their_way = math.ceil(bytes_per_s * PUT_S / max_batch_bytes)
    return min(2 + max(2, on_their_way), MAX_SLOTS)


def slot_nbytes(max_batch_bytes: int, *, spec: ExtractionSpec, hidden_size: int) -> int:
    """Bytes a slot needs for any batch whose rows take up to `max_batch_bytes`: header and flags included."""
    max_rows = max_batch_bytes // spec.bytes_per_token(hidden_size)
    return max_batch_bytes + max_rows * (HEADER_BYTES_A_ROW + spec.item_bytes) + HEADER_BYTES


class Slot:
    """Host memory for one batch: pinned, with a twin on the device, where there is a GPU.

    The device writes rows and, behind them, a finiteness flag a row into `words`; one copy brings all of it
    to the host. On a CPU `words` is the host memory itself.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._twin = torch.empty(nbytes, dtype=torch.uint8, device=device) if is_cuda else None
        self._computed = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The host memory."""
        view: NDArray[np.uint8] = self._host.numpy()
        return view

    def words(self, layout: BatchLayout) -> Tensor:
        """Where the device writes the batch: its data, then a flag a row, in integers of a state's size."""
        begin, end = self._span(layout)
        written = self._host[begin:end] if self._twin is None else self._twin[begin:end]
        return written.view(_WORD[layout.spec.item_bytes])

    def send(self, layout: BatchLayout, copies: torch.cuda.Stream | None) -> None:
        """Start the copy to the host on the stream `copies`, after the current stream's work so far."""
        if self._twin is None or self._computed is None or self._copied is None or copies is None:
            return
        begin, end = self._span(layout)
        self._computed.record(torch.cuda.current_stream(self._twin.device))
        copies.wait_event(self._computed)
        with torch.cuda.stream(copies):
            self._host[begin:end].copy_(self._twin[begin:end], non_blocking=True)
            self._copied.record(copies)

    def wait_until_computed(self) -> None:
        """Block, without the GIL, until the device is through with the batch; its copy begins then."""
        if self._computed is not None:
            self._computed.synchronize()

    def wait_until_copied(self) -> None:
        """Block, without the GIL, until the copy is done."""
        if self._copied is not None:
            self._copied.synchronize()

    def unfinite_rows(self, layout: BatchLayout) -> list[int]:
        """Rows with a state that isn't finite; to be asked before `finish`."""
        flags = self._host[layout.file_nbytes : self._span(layout)[1]].view(_WORD[layout.spec.item_bytes])
        return [int(i) for i in (flags == 0).nonzero()[:, 0]]

    def finish(self, layout: BatchLayout, dropped: Collection[int]) -> BatchLayout:
        """Make the bytes the finished file: close the gaps of dropped rows and write the header."""
        kept = layout.without(dropped)
        old_offsets = [offset for i, offset in enumerate(layout.offsets) if i not in dropped]
        for old, new, nbytes in zip(old_offsets, kept.offsets, kept.nbytes, strict=True):
            if new < old:
                self.memory[new : new + nbytes] = self.memory[old : old + nbytes]
        self.memory[: kept.data_offset] = np.frombuffer(kept.header(), np.uint8)
        return kept

    def file(self, layout: BatchLayout) -> memoryview:
        """The finished file."""
        return self.memory[: layout.file_nbytes].data

    def _span(self, layout: BatchLayout) -> tuple[int, int]:
        end = layout.file_nbytes + len(layout.keys) * layout.spec.item_bytes
        assert end <= len(self._host), f"a batch of {end} bytes in a slot of {len(self._host)}"
        return layout.data_offset, end


class SlotPool:
    """The slots of one device, allocated once: they bound the host memory, and are the back-pressure."""

    def __init__(self, num_slots: int, nbytes: int, device: torch.device) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for _ in range(num_slots):
            self._free.put(Slot(nbytes, device))

    def acquire(self, while_waiting: Callable[[], None]) -> Slot:
        """Wait for a free slot; `while_waiting` is called every second of it and may raise."""
        while True:
            try:
                return self._free.get(timeout=1.0)
            except Empty:
                while_waiting()

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        self._free.put(slot)


def pack(
    words: Tensor,
    layout: BatchLayout,
    first: int,
    states: Sequence[Tensor],
    ids_BT: Tensor,
    lengths_B: Tensor,
) -> None:
    """Write the real tokens of rows `first` to `first + B` to their places in the file, and finiteness flags.

    Args:
        words: the slot's `words(layout)`.
        layout: the batch.
        first: the first of the rows in `states`.
        states: [B, T, H] for each layer, then the last state if it is stored.
        ids_BT: token ids, int32.
        lengths_B: the rows' numbers of tokens, on the device: asking the device for anything would stall it.
    """
    word, num_layers = words.dtype, len(layout.spec.layer_ids)
    lengths = layout.num_tokens[first : first + len(ids_BT)]
    parts = list(states)
    if words.is_cuda:  # a copy is a launch there: let them be few
        parts = [torch.stack(parts[:num_layers], dim=2), *parts[num_layers:]]
    pieces = [_real(part.contiguous().view(word), lengths) for part in parts]
    pieces.append(_real(ids_BT.contiguous().view(word).view(*ids_BT.shape, -1), lengths))

    rows = list(zip(*pieces, strict=True))
    sizes = [piece.numel() for row in rows for piece in row]
    begin = (layout.offsets[first] - layout.data_offset) // layout.spec.item_bytes
    words_of_rows = words[begin : begin + sum(sizes)]
    if words.is_cuda:
        pieces_of_rows = [piece for row in rows for piece in row]
        torch._foreach_copy_(list(torch.split(words_of_rows, sizes)), pieces_of_rows)
    else:  # torch would share each copy out to threads, which wait for one another where cores are busy
        for place, source in zip(*_interleaved(words_of_rows, rows, lengths, num_layers), strict=True):
            np.copyto(place.numpy(), source.numpy())

    flags = words[layout.data_nbytes // layout.spec.item_bytes :]
    flags[first : first + len(lengths)] = _finite_rows(parts, lengths_B)


def _interleaved(
    words: Tensor, rows: Sequence[Sequence[Tensor]], lengths: Sequence[int], num_layers: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Places and sources of rows whose layers are apart: strided, which saves a pass over all states."""
    places, sources = list[Tensor](), list[Tensor]()
    mine = torch.split(words, [sum(piece.numel() for piece in row) for row in rows])
    for row_words, row, num_tokens in zip(mine, rows, lengths, strict=True):
        layers, others = row[:num_layers], row[num_layers:]
        among, *apart = torch.split(row_words, [num_layers * layers[0].numel(), *(x.numel() for x in others)])
        places += [*among.view(num_tokens, num_layers, -1).unbind(1), *apart]
        sources += [*(layer.view(num_tokens, -1) for layer in layers), *others]
    return places, sources


def _real(padded: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """The part of each row that isn't padding, as flat views of the contiguous [B, T, …] tensor."""
    longest = padded.shape[1]
    token = padded[0, 0].numel()
    sizes = [size for n in lengths for size in (n * token, (longest - n) * token)]
    return torch.split(padded.view(-1), sizes)[::2]


def _finite_rows(parts: Sequence[Tensor], lengths_B: Tensor) -> Tensor:
    """For each row whether all states of its real tokens are finite; padding may hold anything."""
    finite_BT = torch.stack([_finite_tokens(part.flatten(2)) for part in parts]).all(dim=0)
    is_padding_BT = torch.arange(finite_BT.shape[1], device=lengths_B.device) >= lengths_B[:, None]
    return (finite_BT | is_padding_BT).all(dim=1)


def _finite_tokens(part_BTW: Tensor) -> Tensor:
    """[B, T] whether all of a token's values are finite."""
    if not part_BTW.is_cuda:  # a tenth of the time, and what isn't finite has no finite sum
        sums_BT = part_BTW.sum(dim=2)
        if sums_BT.isfinite().all():
            return torch.isfinite(sums_BT)
    return torch.isfinite(torch.linalg.vector_norm(part_BTW, ord=float("inf"), dim=2))
