"""Which rows of all plans are stored, and where, and which were refused, for good or until the next run."""

import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from layertap.background import at_once
from layertap.batch_header import read_header
from layertap.errors import CatalogError, IntegrityError, NotFoundError
from layertap.keys import KEY_BYTES, find_keys, keys_of, sortable
from layertap.records import Outcome, get_checked, may_be_tried_again, read_record
from layertap.store import Store

if TYPE_CHECKING:
    from layertap.catalog import Catalog

log = logging.getLogger(__name__)

WITHDRAW = "To compute its rows again, withdraw them with"

_N = TypeVar("_N", np.int32, np.int64, np.uint64)


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Rows of committed shards, each key once, ascending: stored, or refused while extracting."""

    keys: NDArray[np.uint8]
    """[m, 16] extraction keys."""

    num_tokens: NDArray[np.int32]
    """[m] tokens, 0 where refused."""

    file: NDArray[np.int32]
    """[m] index into `files`, -1 where refused."""

    offset: NDArray[np.int64]
    """[m] where the row begins in its file, in bytes."""

    nbytes: NDArray[np.int64]
    """[m] bytes of the row."""

    crc64nvme: NDArray[np.uint64]
    """[m] CRC64NVME of those bytes."""

    files: tuple[str, ...]
    """Paths under the root."""

    reasons: dict[int, str]
    """Index of a refused row -> why."""

    is_final: NDArray[np.bool_]
    """[m] False where a device had no memory for the row: another one, or a later day, may have."""

    @property
    def final_keys(self) -> NDArray[np.uint8]:
        """[n, 16] keys of the rows that need no computing any more, ascending."""
        return self.keys[self.is_final]

    def find(self, keys: NDArray[np.uint8]) -> NDArray[np.int64]:
        """[n] index of each of the keys [n, 16], -1 where it isn't settled."""
        return find_keys(self.keys, keys)


@dataclass(frozen=True)
class _Part:
    """What one shard settles: an index of stored rows, and refused ones."""

    prefix: str
    index: pa.Table
    refused: list[dict[str, str]]


def read_settled(catalog: "Catalog") -> Settled:
    """Read the indices of all committed shards of all plans.

    Raises:
        CatalogError: a plan is of another extraction than the root.
        IntegrityError: the record or the index of committed rows was damaged; says how to compute them again.
    """
    committed = {plan_id: catalog.committed(plan_id) for plan_id in catalog.store.folders("plans")}
    _refuse_other_specs(catalog, committed)
    places = [(plan_id, shard) for plan_id, shards in committed.items() for shard in shards]
    return _merge([*at_once(lambda at: _read_part(catalog, *at), places).values()])


def _refuse_other_specs(catalog: "Catalog", committed: Mapping[str, list[int]]) -> None:
    expected = catalog.root().spec.fingerprint
    for plan_id, shards in committed.items():
        found = _spec_of(catalog, plan_id, shards)
        if found not in (None, expected):
            raise CatalogError(
                f"{catalog.store.uri}/plans/{plan_id} is of another extraction (spec {found}) than this root "
                f"(spec {expected}): move that plan's folder out of the root, or restore the layertap.json "
                "it was made for"
            )


def _spec_of(catalog: "Catalog", plan_id: str, committed: Sequence[int]) -> str | None:
    """Fingerprint of a plan's spec; if its record is lost, by its first batch file, and None without one."""
    try:
        return catalog.plan_spec(plan_id)
    except (IntegrityError, NotFoundError) as error:
        if committed or isinstance(error, IntegrityError):  # else not all of it is written yet
            log.warning("of a plan only what it has committed counts, the rest is planned anew: %s", error)
    found = (_spec_of_shard(catalog, plan_id, shard) for shard in committed)
    return next(filter(None, found), None)


def _spec_of_shard(catalog: "Catalog", plan_id: str, shard: int) -> str | None:
    """Fingerprint of the spec by the header of a shard's first batch file; None if it has no file."""
    with _telling_way_out(catalog, plan_id, shard):
        outcome = catalog.outcome(plan_id, shard)
        for file in outcome.files[:1]:
            path = f"{catalog.attempt_prefix(plan_id, shard, outcome.attempt)}/{file['name']}"
            header = read_header(catalog.store, path, file["size"])
            return read_record(path, header, lambda values: str(values["__metadata__"]["spec_fingerprint"]))
    return None


def _read_part(catalog: "Catalog", plan_id: str, shard: int) -> _Part:
    with _telling_way_out(catalog, plan_id, shard):
        outcome = catalog.outcome(plan_id, shard)
        prefix = catalog.attempt_prefix(plan_id, shard, outcome.attempt)
        return _Part(prefix, read_index(catalog.store, prefix, outcome), outcome.refused)


@contextmanager
def _telling_way_out(catalog: "Catalog", plan_id: str, shard: int) -> Iterator[None]:
    """Have errors about what a committed shard has lost say how its rows are computed again."""
    try:
        yield
    except (IntegrityError, NotFoundError) as error:
        raise IntegrityError(f"{error}. {way_out(catalog.store.uri, plan_id, shard)}") from error


def read_index(store: Store, prefix: str, outcome: Outcome) -> pa.Table:
    """The index of an attempt's rows.

    Raises:
        IntegrityError, NotFoundError: it was damaged, or is gone.
    """
    data = get_checked(store, f"{prefix}/{outcome.index['name']}", outcome.index["checksum"])
    return pq.read_table(BytesIO(data))


def way_out(uri: str, plan_id: str, shard: int) -> str:
    """How the rows of a shard are computed again that can't be read any more."""
    return f"{WITHDRAW} `{void_command(uri, plan_id, [shard])}` and start the run again"


def void_command(uri: str, plan_id: str, shards: Iterable[int] | None) -> str:
    """What withdraws shards of a plan, as a shell takes it; None stands for all of them."""
    chosen = ["--all"] if shards is None else map(str, shards)
    return shlex.join(["layertap", "void", uri, plan_id, *chosen, "--withdraw"])


def says_way_out(error: str) -> bool:
    """Whether a shard's error says that its rows must be withdrawn: another try would fail as well."""
    return WITHDRAW in error


def _merge(parts: list[_Part]) -> Settled:
    """One table of all parts: a key counts as stored if it is anywhere, then as refused for good."""
    refused = sorted((row for part in parts for row in part.refused), key=may_be_tried_again)
    refused_keys = np.frombuffer(bytes.fromhex("".join(row["key"] for row in refused)), np.uint8)
    keys = np.concatenate(
        [*(_keys(part.index) for part in parts), refused_keys.reshape(-1, KEY_BYTES)], dtype=np.uint8
    )
    files, codes = _number_files(parts)
    num_stored = len(keys) - len(refused)
    _, first = np.unique(sortable(keys), return_index=True)
    return Settled(
        keys=keys[first],
        num_tokens=_column(parts, "num_tokens", np.int32, len(refused))[first],
        file=np.concatenate([*codes, np.full(len(refused), -1, np.int32)])[first],
        offset=_column(parts, "offset", np.int64, len(refused))[first],
        nbytes=_column(parts, "nbytes", np.int64, len(refused))[first],
        crc64nvme=_column(parts, "crc64nvme", np.uint64, len(refused))[first],
        files=files,
        reasons={
            int(i): refused[k - num_stored]["reason"] for i, k in enumerate(first.tolist()) if k >= num_stored
        },
        is_final=~np.array([False] * num_stored + [may_be_tried_again(row) for row in refused], bool)[first],
    )


def _number_files(parts: Iterable[_Part]) -> tuple[tuple[str, ...], list[NDArray[np.int32]]]:
    files: list[str] = []
    codes: list[NDArray[np.int32]] = []
    for part in parts:
        column = pa.chunked_array(part.index["file"]).combine_chunks().dictionary_encode()
        codes.append(column.indices.to_numpy() + np.int32(len(files)))
        files.extend(f"{part.prefix}/{name}" for name in column.dictionary.to_pylist())
    return tuple(files), codes


def _keys(index: pa.Table) -> NDArray[np.uint8]:
    chunks = index["extraction_key"].chunks
    return np.concatenate([np.empty((0, KEY_BYTES), np.uint8), *map(keys_of, chunks)])


def _column(parts: Iterable[_Part], name: str, dtype: type[_N], num_refused: int) -> NDArray[_N]:
    """A number of each stored row, then zeros for the refused ones."""
    stored: list[NDArray[_N]] = [part.index[name].to_numpy() for part in parts]
    return np.concatenate([*stored, np.zeros(num_refused, dtype)], dtype=dtype)
