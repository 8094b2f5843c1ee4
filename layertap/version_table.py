"""The table of a version: each row of the dataset with its place, or with the reason why it has none."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from layertap.keys import KEY_BYTES, key_array
from layertap.settled import Settled

if TYPE_CHECKING:
    from layertap.dataset import Scan, TokenDataset

ROW_GROUP = 65_536

ROW_GROUP_TOKENS = 1 << 28
"""Tokens of the rows of one group: Arrow counts the values of an array's masks in 31 bits."""

NOT_EXTRACTED = "not extracted: no committed shard holds it"

FIELDS: list[Any] = [
    pa.field("index", pa.int64()),
    pa.field("id", pa.string()),
    pa.field("extraction_key", pa.binary(KEY_BYTES)),
    pa.field("loss_mask", pa.list_(pa.uint8())),
    pa.field("num_tokens", pa.int32()),
    pa.field("file", pa.string()),
    pa.field("offset", pa.int64()),
    pa.field("nbytes", pa.int64()),
    pa.field("crc64nvme", pa.uint64()),
    pa.field("reason", pa.string()),
]
SCHEMA = pa.schema(FIELDS)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where each row of a dataset lies, or why it doesn't."""

    keys: NDArray[np.uint8]
    num_tokens: NDArray[np.int32]
    file: NDArray[np.int32]
    """Index into `files`, -1 where missing."""

    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    crc64nvme: NDArray[np.uint64]
    is_final: NDArray[np.bool_]
    """False where a device had no memory for the row: the next run tries it again."""

    files: tuple[str, ...]
    reasons: dict[int, str]
    content: str

    @classmethod
    def of(cls, scan: "Scan", settled: Settled) -> Self:
        """The places of the dataset's rows among what the store holds."""
        at = settled.find(scan.keys)
        arrays: dict[str, NDArray[Any]] = {}
        for name in ("file", "offset", "nbytes", "crc64nvme", "is_final"):
            values = getattr(settled, name)
            arrays[name] = np.append(values, np.array(-1).astype(values.dtype))[at]
        reasons = {
            row: scan.refused.get(row) or settled.reasons.get(int(at[row]), NOT_EXTRACTED)
            for row in np.flatnonzero(arrays["file"] < 0).tolist()
        }
        names = [hashlib.blake2b(name.encode(), digest_size=16).digest() for name in settled.files]
        name_hashes = np.frombuffer(b"".join([*names, bytes(16)]), np.uint8).reshape(-1, 16)
        digest = hashlib.blake2b(scan.fingerprint.encode(), digest_size=16)
        for part in (
            scan.keys,
            scan.num_tokens,
            arrays["offset"],
            arrays["nbytes"],
            name_hashes[arrays["file"]],
        ):
            digest.update(np.ascontiguousarray(part).data)
        digest.update(json.dumps(reasons, sort_keys=True).encode())
        return cls(
            keys=scan.keys,
            num_tokens=scan.num_tokens,
            files=settled.files,
            reasons=reasons,
            content=digest.hexdigest(),
            **arrays,
        )

    def to_parquet(self, dataset: "TokenDataset") -> bytes:
        """The table as a Parquet file; the dataset has the masks and user ids."""
        sink = BytesIO()
        with pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer:
            for start, end in self._groups():
                writer.write_table(self._table(dataset, start, end))
        return sink.getvalue()

    def _groups(self) -> Iterator[tuple[int, int]]:
        ends = np.cumsum(self.num_tokens, dtype=np.int64)
        start = 0
        while start < len(ends):
            before = ends[start] - self.num_tokens[start]
            by_tokens = int(np.searchsorted(ends, before + ROW_GROUP_TOKENS, side="right"))
            end = min(start + ROW_GROUP, max(by_tokens, start + 1), len(ends))
            yield start, end
            start = end

    def _table(self, dataset: "TokenDataset", start: int, end: int) -> pa.Table:
        part = slice(start, end)
        is_valid, is_missing = self.num_tokens[part] > 0, self.file[part] < 0
        columns: list[Any] = [
            pa.array(np.arange(start, end)),
            pa.array([dataset.user_id(row) for row in range(start, end)], pa.string()),
            key_array(self.keys[part], is_valid),
            self._masks(dataset, start, end),
            pa.array(self.num_tokens[part]),
            pa.array(self.files, pa.string()).take(pa.array(self.file[part], pa.int32(), mask=is_missing)),
            pa.array(self.offset[part], mask=is_missing),
            pa.array(self.nbytes[part], mask=is_missing),
            pa.array(self.crc64nvme[part], mask=is_missing),
            pa.array([self.reasons.get(row) for row in range(start, end)], pa.string()),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA)

    def _masks(self, dataset: "TokenDataset", start: int, end: int) -> Any:
        """[rows] loss masks as long as the rows; null where refused, and in a dataset without masks."""
        lengths = self.num_tokens[start:end]
        if not dataset.has_loss_mask:
            return pa.nulls(end - start, pa.list_(pa.uint8()))
        masks = [np.asarray(dataset.loss_mask(start + int(i)))[: lengths[i]] for i in np.flatnonzero(lengths)]
        offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int64).astype(np.int32), pa.int32())
        values = pa.array(np.concatenate([np.empty(0, np.uint8), *masks]), pa.uint8())
        return pa.ListArray.from_arrays(offsets, values, mask=pa.array(lengths == 0))
