"""Versions of a dataset in a root: every input row once, with its place or with the reason why it is missing.

A version is `versions/<number>.json`, created once, and the table of rows that it names. Masks and user ids
live in the table, so a dataset with other masks is a new version of the same hidden states.
"""

import logging
import operator
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from layertap.catalog import Catalog, shard_of
from layertap.errors import AlreadyExistsError, CatalogError, IntegrityError, NotFoundError
from layertap.records import (
    check_format,
    get_checked,
    known_fields,
    now,
    read_record,
    require,
    to_json,
)
from layertap.settled import Settled
from layertap.spec import FORMAT_VERSION
from layertap.store import Store, checksum
from layertap.told import read_told
from layertap.version_table import NOT_EXTRACTED, Places

if TYPE_CHECKING:
    from layertap.dataset import Scan, TokenDataset

log = logging.getLogger(__name__)

RECORD = re.compile(r"versions/([1-9][0-9]*)\.json")

ADDED_FIELDS = ("num_supervised", "num_rows_below_block", "block_tokens", "num_without_memory")
"""Fields of a version that an older layertap didn't write."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One state of a dataset in a root."""

    number: int
    """From 1."""

    parent: int | None
    """The version before it."""

    complete: bool
    """Whether every row is stored or was refused, be it for good or because a GPU had no memory for it."""

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

    num_without_memory: int | None = None
    """Rows refused because a GPU had no memory for them: the next run tries them again, no schedule does."""

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
        with suppress(NotFoundError):
            path = f"versions/{number}.json"
            return read_record(path, self.store.get(path), Version.from_dict)
        return None

    def find_whole(self, number: int) -> Version | None:
        """A version, as `find`; None with a warning if its record was damaged."""
        with suppress(NotFoundError):
            return read_told(self.store, f"versions/{number}.json", Version.from_dict)
        return None

    def latest(self, *, complete: bool = True) -> Version | None:
        """The newest version, of the complete ones unless told otherwise; None if there is none.

        One whose record was damaged is passed over with a warning.
        """
        for number in reversed(self.numbers()):
            version = self.find_whole(number)
            if version is None and number not in self.numbers():  # pruned, so a newer one was published
                return self.latest(complete=complete)
            if version is not None and (version.complete or not complete):
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
        places = Places.of(scan, settled)
        while True:
            number = self.newest_number()
            newest = None if number is None else self.find_whole(number)
            said = (places.content, dataset.provenance)
            if newest and (newest.content, newest.provenance) == said and self._is_readable(newest):
                return newest
            self._refuse_older(scan.fingerprint, parent)
            version = self._version(places, dataset, scan, number)
            self._refuse_withdrawn(places)
            with suppress(AlreadyExistsError):
                self.store.create(f"versions/{version.number}.json", to_json(asdict(version)))
                self._refuse_withdrawn(places)  # should this process have slept for long before it
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

    def _refuse_withdrawn(self, places: Places) -> None:
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

    def _version(self, places: Places, dataset: "TokenDataset", scan: "Scan", parent: int | None) -> Version:
        from layertap.dataset import BLOCK_TOKENS

        data = places.to_parquet(dataset)
        path = self._put_table(places.content, data)
        is_stored = places.file >= 0
        return Version(
            number=(parent or 0) + 1,
            parent=parent,
            complete=NOT_EXTRACTED not in places.reasons.values(),
            dataset_fingerprint=scan.fingerprint,
            spec_fingerprint=Catalog(self.store).root().spec.fingerprint,
            num_rows=dataset.num_rows,
            num_stored=dataset.num_rows - len(places.reasons),
            num_tokens=int(places.num_tokens[is_stored].sum(dtype=np.int64)),
            num_supervised=int(scan.num_supervised[is_stored].sum(dtype=np.int64)),
            num_rows_below_block=int(np.count_nonzero(scan.has_few_supervised[is_stored])),
            block_tokens=BLOCK_TOKENS,
            num_without_memory=int(np.count_nonzero(~places.is_final)),
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
