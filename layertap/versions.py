"""Versions of a dataset in a root: every input row once, with its place or with the reason why it is missing.

A version is `versions/<number>.json`, created once, and the table of rows that it names. Masks and user ids
live in the table, so a dataset with other masks is a new version of the same hidden states.
"""

import hashlib
import json
import logging
import operator
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from layertap.catalog import Catalog, shard_of
from layertap.errors import AlreadyExistsError, CatalogError, IntegrityError, NotFoundError
from layertap.records import (
    check_format,
    get_checked,
    key_array,
    known_fields,
    now,
    read_record,
    require,
    to_json,
)
from layertap.settled import Settled
from layertap.spec import FORMAT_VERSION
from layertap.store import Store, checksum

if TYPE_CHECKING:
    from layertap.dataset import Scan, TokenDataset

log = logging.getLogger(__name__)

ROW_GROUP = 65_536

ROW_GROUP_TOKENS = 1 << 28
"""Tokens of the rows of one group: Arrow counts the values of an array's masks in 31 bits."""

RECORD = re.compile(r"versions/([1-9][0-9]*)\.json")

ADDED_FIELDS = ("num_supervised", "num_rows_below_block", "block_tokens")
"""Fields of a version that an older layertap didn't write."""

NOT_EXTRACTED = "not extracted: no committed shard holds it"

FIELDS: list[Any] = [
    pa.field("index", pa.int64()),
    pa.field("id", pa.string()),
    pa.field("extraction_key", pa.binary(16)),
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
class Version:
    """One state of a dataset in a root."""

    number: int
    """From 1."""

    parent: int | None
    """The version before it."""

    complete: bool
    """Whether every row is stored or was refused."""

    dataset_fingerprint: str
    spec_fingerprint: str

    num_rows: int
    """Rows of the dataset."""

    num_stored: int
    """Rows of it that can be read."""

    num_tokens: int
    """Tokens of those."""

    content: str
    """32 hex digits over the dataset's fingerprint and each row's place or reason."""

    rows: dict[str, Any]
    """The table of rows: path, size, checksum."""

    provenance: dict[str, Any]
    """Where the dataset comes from, as far as recorded."""

    created_at: str

    num_supervised: int | None = None
    """Tokens of the stored rows under the loss mask; None in versions of an older layertap, as below."""

    num_rows_below_block: int | None = None
    """Stored rows with fewer supervised tokens than `block_tokens`."""

    block_tokens: int | None = None
    """Tokens of a drafter's block."""

    format_version: str = FORMAT_VERSION

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; fields of newer minor formats are ignored.

        Raises:
            FormatError: written by a newer major format.
        """
        check_format(f"version {values['number']}", values["format_version"])
        require(values["rows"], "path", "size", "checksum")
        return cls(**known_fields(cls, {**dict.fromkeys(ADDED_FIELDS), **values}))


def files_of(rows: pa.Table) -> set[str]:
    """The batch files that a version's table names."""
    return {name for name in rows["file"].unique().to_pylist() if name is not None}


class Versions:
    """The versions of one root."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def numbers(self) -> list[int]:
        """Numbers of all versions, ascending."""
        found = [RECORD.fullmatch(info.path) for info in self.store.list("versions")]
        return sorted(int(match[1]) for match in found if match)  # the rest are tables, or files of others

    def newest_number(self) -> int | None:
        """Number of the newest version, complete or not."""
        return max(self.numbers(), default=None)

    def get(self, number: int) -> Version:
        """A version.

        Raises:
            CatalogError: there is none of that number, or it isn't a number.
            FormatError: written by a newer major format.
            IntegrityError: its record was damaged.
        """
        if isinstance(number, bool) or not isinstance(number, SupportsIndex):
            raise CatalogError(f"version {number!r} is no version's number: give an int, such as version=1")
        version = self.find(operator.index(number))
        if version is None:
            there = ", ".join(map(str, self.numbers())) or "none yet"
            raise CatalogError(f"{self.store.uri} has no version {number}; versions there: {there}")
        return version

    def find(self, number: int) -> Version | None:
        """A version, as `get`; None if there is none of that number, perhaps because it was just pruned."""
        path = f"versions/{number}.json"
        try:
            data = self.store.get(path)
        except NotFoundError:
            return None
        return read_record(path, data, Version.from_dict)

    def latest(self, *, complete: bool = True) -> Version | None:
        """The newest version, of the complete ones unless told otherwise; None if there is none."""
        numbers = self.numbers()
        for number in reversed(numbers):
            version = self.find(number)
            if version is None:  # pruned meanwhile, so a newer one was published
                return self.latest(complete=complete)
            if version.complete or not complete:
                return version
        return None

    def files(self, number: int) -> set[str] | None:
        """The batch files that a version names; None if it was pruned meanwhile.

        Raises:
            IntegrityError, NotFoundError: its record or its table was damaged, or the table is gone.
        """
        version = self.find(number)
        try:
            return files_of(self.rows(version, ["file"])) if version else None
        except NotFoundError:
            if self.find(number) is None:
                return None
            raise

    def rows(self, version: Version, columns: list[str] | None = None) -> pa.Table:
        """The table of a version's rows, or some of its columns; `file` is dictionary-encoded."""
        data = get_checked(self.store, version.rows["path"], version.rows["checksum"])
        return pq.read_table(BytesIO(data), columns=columns, read_dictionary=["file"])

    def missing_rows(self, version: Version) -> pa.Table:
        """The lines of the rows that aren't stored: index, id, num_tokens, reason."""
        table = self.rows(version, ["index", "id", "num_tokens", "reason"])
        return table.filter(table["reason"].is_valid())

    def missing(self, version: Version) -> dict[int, str]:
        """Row of the dataset -> why it isn't stored."""
        missing = self.missing_rows(version)
        rows: list[Any] = missing["index"].to_pylist()
        reasons: list[Any] = missing["reason"].to_pylist()
        return dict(zip(rows, reasons, strict=True))

    def publish(
        self, dataset: "TokenDataset", scan: "Scan", settled: Settled, *, parent: int | None
    ) -> Version:
        """Make a version of what the store holds of a dataset, or return the newest if it says the same.

        Args:
            dataset: for masks and user ids.
            scan: its rows: keys, lengths, and what was refused.
            settled: the rows the store holds.
            parent: the newest version when the run read the dataset, None if there was none.

        Raises:
            CatalogError: another dataset has been published since, and this one may be older; or some of the
                rows were withdrawn meanwhile.
        """
        places = _Places.of(scan, settled)
        while True:
            newest = self.latest(complete=False)
            if newest is not None and newest.content == places.content and self._is_readable(newest):
                return newest
            self._refuse_older(scan.fingerprint, parent)
            version = self._version(places, dataset, scan, newest)
            self._refuse_withdrawn(places)
            with suppress(AlreadyExistsError):
                self.store.create(f"versions/{version.number}.json", to_json(asdict(version)))
                return version

    def _is_readable(self, version: Version) -> bool:
        """Whether the version's table is whole; if not, a new version takes its place."""
        try:
            get_checked(self.store, version.rows["path"], version.rows["checksum"])
        except (IntegrityError, NotFoundError) as error:
            log.warning("version %d is published anew, for its table is lost: %s", version.number, error)
            return False
        return True

    def _refuse_older(self, dataset_fingerprint: str, parent: int | None) -> None:
        for number in self.numbers():
            version = self.find(number) if number > (parent or 0) else None
            if version is not None and version.dataset_fingerprint != dataset_fingerprint:
                raise CatalogError(
                    f"version {number} of another dataset was published at {version.created_at}, after this "
                    "run had read its own. What it extracted is stored; to publish it, start the run again"
                )

    def _refuse_withdrawn(self, places: "_Places") -> None:
        """Look once more when the table stands: gc spares its files from now on, and may have taken some."""
        catalog = Catalog(self.store)
        shards = {shard_of(places.files[i]) for i in np.unique(places.file[places.file >= 0])}
        for plan_id in sorted({plan_id for plan_id, _ in shards}):
            gone = {shard for found, shard in shards if found == plan_id} - {*catalog.committed(plan_id)}
            if gone:
                raise CatalogError(
                    f"shard {min(gone)} of plan {plan_id} was withdrawn while a version was made of it: "
                    "start the run again, which computes its rows anew"
                )

    def _version(
        self, places: "_Places", dataset: "TokenDataset", scan: "Scan", newest: Version | None
    ) -> Version:
        from layertap.dataset import BLOCK_TOKENS

        data = places.to_parquet(dataset)
        path = self._put_table(places.content, data)
        is_stored = places.file >= 0
        return Version(
            number=newest.number + 1 if newest else 1,
            parent=newest.number if newest else None,
            complete=NOT_EXTRACTED not in places.reasons.values(),
            dataset_fingerprint=scan.fingerprint,
            spec_fingerprint=Catalog(self.store).root().spec.fingerprint,
            num_rows=dataset.num_rows,
            num_stored=dataset.num_rows - len(places.reasons),
            num_tokens=int(places.num_tokens[is_stored].sum(dtype=np.int64)),
            num_supervised=int(scan.num_supervised[is_stored].sum(dtype=np.int64)),
            num_rows_below_block=int(np.count_nonzero(scan.has_few_supervised[is_stored])),
            block_tokens=BLOCK_TOKENS,
            content=places.content,
            rows={"path": path, "size": len(data), "checksum": checksum(data)},
            provenance=dataset.provenance,
            created_at=now(),
        )

    def _put_table(self, content: str, data: bytes) -> str:
        """Write a table under a name of its own: one that lies there may be about to be pruned."""
        path = f"versions/{content}-{secrets.token_hex(4)}.parquet"
        self.store.put(path, data, durable=True)
        return path


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where each row of a dataset lies, or why it doesn't."""

    keys: NDArray[np.uint8]
    num_tokens: NDArray[np.int32]
    file: NDArray[np.int32]
    """Index into `files`, -1 where missing."""

    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    crc64nvme: NDArray[np.uint64]
    files: tuple[str, ...]
    reasons: dict[int, str]
    content: str

    @classmethod
    def of(cls, scan: "Scan", settled: Settled) -> Self:
        at = settled.find(scan.keys)
        arrays: dict[str, NDArray[Any]] = {}
        for name in ("file", "offset", "nbytes", "crc64nvme"):
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
