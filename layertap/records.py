"""What the catalog's objects hold: the root's record, plans, shards' rows, claims and outcomes."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from io import BytesIO
from typing import Any, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from layertap.errors import FormatError, InputError, IntegrityError, SpecError
from layertap.keys import extraction_key, key_array, keys_of
from layertap.plan import PlanSettings
from layertap.spec import FORMAT_VERSION, ExtractionSpec
from layertap.store import Store, checksum

PLAN_SCHEMA = 1
"""Schema of plans; a lane works on no other."""

RECORD_CHECKSUM = "record_checksum"
"""The field of a record that holds the checksum of all others."""

MAX_INT32 = 2**31 - 1

DATA, MEMORY = "data", "memory"
"""Why a row was refused: for what it is, for good; or for want of memory, until the next run."""

_R = TypeVar("_R")


def now(timespec: str = "seconds") -> str:
    """The time of day in UTC, ISO 8601.

    Args:
        timespec: how fine, as `datetime.isoformat` has it.
    """
    return datetime.now(UTC).isoformat(timespec=timespec)


def to_json(values: Mapping[str, Any]) -> bytes:
    """A record's bytes, with the checksum of its other fields: a flipped bit may leave it valid JSON."""
    # as JSON reads them: a number as a name becomes text
    others = json.loads(json.dumps({k: v for k, v in values.items() if k != RECORD_CHECKSUM}))
    return json.dumps({**others, RECORD_CHECKSUM: _checksum_of(others)}, indent=1).encode()


def _checksum_of(values: Mapping[str, Any]) -> str:
    """Of values that JSON gave, however they were laid out."""
    return checksum(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def from_json(path: str, data: bytes) -> dict[str, Any]:
    """The values of a JSON object.

    Raises:
        IntegrityError: no JSON object; records are written whole, so something else damaged it.
    """
    try:
        values = json.loads(data)
    except ValueError as error:
        raise IntegrityError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise IntegrityError(f"{path} is damaged: no JSON object")
    return values


def read_record(path: str, data: bytes, parse: Callable[[dict[str, Any]], _R]) -> _R:
    """A record from its bytes.

    Raises:
        IntegrityError: no JSON object, not the values that were written, or it lacks a field; names the path,
            and the field.
        FormatError: from `parse`.
    """
    values = from_json(path, data)
    written = values.pop(RECORD_CHECKSUM, None)  # older records have none
    if written is not None and written != (found := _checksum_of(values)):
        raise IntegrityError(f"{path} is damaged: its fields have the checksum {found}, but were {written}")
    return parsed(path, values, parse)


def parsed(path: str, values: dict[str, Any], parse: Callable[[dict[str, Any]], _R]) -> _R:
    """A record, or a part of one, from its values; raises as `read_record` does."""
    try:
        return parse(values)
    except KeyError as error:
        raise IntegrityError(f"{path} is damaged: it lacks the field {error}") from error
    except (SpecError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged: {error}") from error


def known_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields; those of newer minor formats are ignored.

    Raises:
        KeyError: there is no value for a field.
    """
    return {f.name: values[f.name] for f in fields(kind)}


def require(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """A record, or a part of one, that has values of these names.

    Raises:
        KeyError: the first that it lacks.
    """
    for name in names:
        values[name]
    return values


def get_checked(store: Store, path: str, expected: str) -> bytes:
    """An object that must have this checksum; fetched again once if it hasn't.

    Raises:
        IntegrityError: names the object and both checksums.
    """
    for _ in range(2):
        data = store.get(path)
        found = checksum(data)
        if found == expected:
            return data
    raise IntegrityError(f"{store.uri}/{path} has the checksum {found}, but was written with {expected}")


def may_be_tried_again(refused: Mapping[str, str]) -> bool:
    """Whether a refused row of an outcome failed for want of memory, and not for what it is."""
    return refused.get("fault", DATA) == MEMORY


def check_format(what: str, version: object) -> None:
    """Refuse what a newer major format wrote.

    Raises:
        FormatError: it needs a newer layertap, or has no format's number.
    """
    number = re.fullmatch(r"([0-9]+)(\.[0-9]+)*", str(version))
    if not number:
        raise FormatError(
            f"{what} has the format_version {version!r}, which is no number like {FORMAT_VERSION}"
        )
    if int(number[1]) > int(FORMAT_VERSION.split(".")[0]):
        raise FormatError(
            f"{what} has format {version}, newer than {FORMAT_VERSION}, which this layertap reads: upgrade it"
        )


@dataclass(frozen=True, kw_only=True)
class Root:
    """What a root is for: layertap.json."""

    spec: ExtractionSpec

    target: dict[str, Any]
    """What is known of the target: source, revision, sizes, quantisation."""

    format_version: str = FORMAT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, with the spec's fingerprint."""
        return {
            "format_version": self.format_version,
            "spec": self.spec.to_dict(),
            "spec_fingerprint": self.spec.fingerprint,
            "target": self.target,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            FormatError: written by a newer major format.
            IntegrityError: the spec isn't the one of the fingerprint beside it.
        """
        check_format("the root", values["format_version"])
        spec = ExtractionSpec.from_dict(values["spec"])
        if values["spec_fingerprint"] != spec.fingerprint:
            raise IntegrityError(
                f"layertap.json is damaged: its spec has the fingerprint {spec.fingerprint}, but it was "
                f"written with {values['spec_fingerprint']}. Its states are those of the spec as it was "
                "written: restore the file"
            )
        return cls(spec=spec, target=values["target"], format_version=values["format_version"])


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """A shard as its plan knows it."""

    num_rows: int
    num_tokens: int
    num_batches: int

    keys_xor: str
    """XOR of its extraction keys, 32 hex digits."""

    checksum: str
    """Of the Arrow file with its rows."""


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan as the store holds it: plan.json."""

    plan_id: str
    spec_fingerprint: str
    settings: PlanSettings
    shards: tuple[ShardRecord, ...]

    max_batch_bytes: int
    """Data bytes of the largest batch file."""

    schema: int = PLAN_SCHEMA

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.num_tokens for shard in self.shards)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; fields of newer minor formats are ignored.

        Raises:
            FormatError: the plan has another schema.
        """
        if values["schema"] != PLAN_SCHEMA:
            raise FormatError(
                f"plan {values['plan_id']} has schema {values['schema']}, this one works on {PLAN_SCHEMA}: "
                "use the layertap that made the plan, or start the run again to make a new one"
            )
        shards = tuple(ShardRecord(**known_fields(ShardRecord, shard)) for shard in values["shards"])
        settings = PlanSettings(**known_fields(PlanSettings, values["settings"]))
        return cls(**{**known_fields(cls, values), "settings": settings, "shards": shards})


@dataclass(frozen=True)
class ShardRows:
    """The rows of a shard: what a lane computes. In order of batches, in a batch longest first."""

    keys: NDArray[np.uint8]
    """[n, 16] extraction keys."""

    batch: NDArray[np.int32]
    """[n] batch number within the shard, ascending."""

    offsets: NDArray[np.int32]
    """[n + 1] where each row begins in `values`."""

    values: NDArray[np.int32]
    """Token ids of all rows, one after another."""

    @classmethod
    def of(
        cls, keys: NDArray[np.uint8], batch: NDArray[np.int32], tokens: Sequence[NDArray[np.int32]]
    ) -> Self:
        """Rows from one token array each.

        Raises:
            InputError: more tokens than the shard's file can count.
        """
        offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        if offsets[-1] > MAX_INT32:
            raise InputError(
                f"a shard of {offsets[-1]} tokens is more than the {MAX_INT32} its file can count: "
                "give a smaller shard_tokens"
            )
        return cls(keys, batch, offsets.astype(np.int32), np.concatenate(tokens).astype(np.int32, copy=False))

    @property
    def num_tokens(self) -> NDArray[np.int32]:
        """[n] tokens of each row."""
        return np.diff(self.offsets)

    def tokens(self, i: int) -> NDArray[np.int32]:
        """Token ids of row `i`, a read-only view."""
        view = self.values[self.offsets[i] : self.offsets[i + 1]]
        view.flags.writeable = False
        return view

    def match_keys(self) -> bool:
        """Whether every row's tokens are those its key was made of."""
        keys = [extraction_key(self.tokens(i).tobytes()) for i in range(len(self.keys))]
        return b"".join(keys) == self.keys.tobytes()

    def to_arrow(self) -> bytes:
        """An Arrow IPC file: extraction_key, input_ids, batch."""
        offsets, values = pa.array(self.offsets, pa.int32()), pa.array(self.values, pa.int32())
        table = pa.table(
            {
                "extraction_key": key_array(self.keys),
                "input_ids": pa.ListArray.from_arrays(offsets, values),
                "batch": pa.array(self.batch, pa.int32()),
            }
        )
        sink = BytesIO()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    @classmethod
    def from_arrow(cls, data: bytes) -> Self:
        """The inverse of `to_arrow`; the arrays are views of `data`."""
        batch = pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)
        lists: Any = batch.column("input_ids")
        return cls(
            keys_of(batch.column("extraction_key")),
            batch.column("batch").to_numpy(),
            lists.offsets.to_numpy(),
            lists.values.to_numpy(),
        )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A lane's claim to a shard."""

    plan_id: str
    shard: int
    number: int
    lane: str

    token: str
    """Random; tells one's own claim, created by a lost and repeated request, from another lane's."""

    details: dict[str, Any] = field(default_factory=dict)
    """Host, device and the like, for people."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a shard: the record that makes its files count."""

    kind: Literal["committed"]
    shard: int
    claim: int

    attempt: str
    """Random id of the try whose files these are."""

    lane: str
    host: str
    device: str

    files: list[dict[str, Any]]
    """Batch files: name under the attempt, size, checksum, num_rows."""

    index: dict[str, Any]
    """The attempt's index.parquet: name, size, checksum."""

    num_rows: int
    """Rows stored."""

    num_tokens: int
    nbytes: int

    refused: list[dict[str, str]]
    """Rows refused during extraction: key in hex, reason, and fault: `data`, or `memory` for now."""

    seconds: dict[str, float]
    """Where the time went."""

    num_splits: int
    """Batches that were cut in two for want of memory."""

    environment: dict[str, Any]
    started_at: str
    ended_at: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; fields of newer minor formats are ignored."""
        for file in [*values["files"], values["index"]]:
            require(file, "name", "size", "checksum")
        for row in values["refused"]:
            require(row, "key", "reason")
        return cls(**known_fields(cls, values))
