"""Whether a root still holds what was written to it: records, headers, checksums, and the states themselves.

Everything is read back from the store; nothing is written. What is found wrong is named with the way out.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from layertap.catalog import Catalog, PlanRecord
from layertap.errors import CatalogError, IntegrityError, NotFoundError
from layertap.keys import KEY_BYTES, keys_of, keys_xor
from layertap.records import Outcome
from layertap.report import MAX_TABLE_ROWS
from layertap.settled import read_index, way_out
from layertap.store import Buffer, Store, checksum
from layertap.stored_rows import StoredFile, StoredRow, wrong_header, wrong_row
from layertap.versions import Versions

FILES_AT_ONCE = 4
"""Batch files read at a time; whole ones take half a gigabyte each in the headline job."""

Wrong = tuple[str, object]
"""Where something is wrong, and what."""

RESTORE = "restore it from a copy"
LEAVE_PLAN = (
    f"{RESTORE}, or leave it: what the plan has committed counts as before, and the next run plans its other "
    "rows anew"
)
RUN_AGAIN = "start the run again: it publishes a new version of the rows that are stored"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it was written."""

    where: str
    """Path under the root; for a row also its extraction key."""

    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(kw_only=True)
class Verification:
    """What was read back, and what was wrong with it."""

    uri: str
    num_records: int = 0
    """Records, indices and tables read."""

    num_files: int = 0
    """Batch files of which something was read."""

    num_rows: int = 0
    """Rows whose bytes were read and checked."""

    num_bytes: int = 0
    """Bytes of those."""

    findings: list[Finding] = field(default_factory=list)
    pruned: list[int] = field(default_factory=list)
    """Versions that were pruned before they could be read."""

    recomputed: str = ""
    """What comparing recomputed rows gave, in words; empty if that wasn't asked for."""

    def __str__(self) -> str:
        read = (
            f"{self.num_records:,} records, {self.num_rows:,} rows in {self.num_files:,} files "
            f"({self.num_bytes / 1e9:.3g} GB) read back: {len(self.findings):,} findings"
        )
        pruned = [f"version {number} was pruned meanwhile" for number in self.pruned]
        return "; ".join([read, *pruned, *filter(None, [self.recomputed])])

    def ways_out(self) -> list[str]:
        """What to do, each once, in the order of the findings."""
        return list(dict.fromkeys(finding.way_out for finding in self.findings))

    def check(self) -> None:
        """Fail if anything was found.

        Raises:
            IntegrityError: names the first findings and what to do.
        """
        if self.findings:
            first = "".join(f"\n  {finding}" for finding in self.findings[:5])
            raise IntegrityError(
                f"{self.uri}: {len(self.findings):,} findings:{first}\n" + "\n".join(self.ways_out()[:5])
            )

    def markdown(self) -> str:
        """The report for a person."""
        lines = [f"{self}."]
        if self.findings:
            lines += ["", "| where | what is wrong | way out |", "| --- | --- | --- |"]
            lines += [f"| {f.where} | {f.problem} | {f.way_out} |" for f in self.findings[:MAX_TABLE_ROWS]]
        return "\n".join(lines)


def verify_root(
    store: Store,
    *,
    num_rows: int | None = 1000,
    target: str | None = None,
    revision: str | None = None,
    num_recomputed: int = 8,
    seed: int | None = None,
) -> Verification:
    """Check every record of the root, and rows of it.

    Args:
        store: the root.
        num_rows: how many, drawn at random; None for all. All rows are read as whole files, so that the
            files' checksums are checked too; of a sample the files' sizes and headers and the rows are.
        target: hub id or folder of the target, to compute some of the rows again; None doesn't.
        revision: hub revision of the target.
        num_recomputed: how many rows are computed again.
        seed: of the draws.

    Raises:
        CatalogError, IntegrityError: there is no root, or its own record is damaged.
        TargetError: the target can't be loaded here, or isn't the one of the root.
        StoreError: the store is away or refuses; that says nothing of what it holds.
    """
    verifier = _Verifier(store)
    named = verifier.check_versions()  # before the outcomes: those that it names are there by now
    files = verifier.committed_files()
    verifier.check_named(named, files)
    verifier.check_target()
    chosen = files if num_rows is None else sample(files, num_rows, seed)
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(verifier.check_whole if num_rows is None else verifier.check_rows, chosen))
    if target is not None:
        from layertap.recompute import recompute

        drawn = sample(chosen, num_recomputed, seed)
        recompute(store, drawn, verifier.report, target=target, revision=revision)
    return verifier.report


def sample(files: list[StoredFile], num_rows: int, seed: int | None = None) -> list[StoredFile]:
    """The files with `num_rows` of their drawn rows, at random; files without one are left out."""
    ends = np.cumsum([len(file.drawn) for file in files], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    drawn = np.random.default_rng(seed).choice(total, min(num_rows, total), replace=False)
    by_file: dict[int, list[int]] = {}
    for k in np.sort(drawn).tolist():
        number = int(np.searchsorted(ends, k, side="right"))
        by_file.setdefault(number, []).append(k - (int(ends[number - 1]) if number else 0))
    return [replace(files[n], drawn=tuple(files[n].drawn[i] for i in rows)) for n, rows in by_file.items()]


class _Verifier:
    """Collects what is wrong with one root."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.catalog = Catalog(store)
        self.spec = self.catalog.root().spec
        self.report = Verification(uri=store.uri)
        self._lock = threading.Lock()

    def _find(self, where: str, problem: object, way: str) -> None:
        text = str(problem).removesuffix(f". {way}")
        text = text.removeprefix(f"{self.store.uri}/").removeprefix(f"{where} ")
        self.report.findings.append(Finding(where=where, problem=text, way_out=way))

    def committed_files(self) -> list[StoredFile]:
        """Batch files of all committed shards, after checks of every record on the way to them."""
        found: list[StoredFile] = []
        for plan_id in self.store.folders("plans"):
            committed = self.catalog.committed(plan_id)
            record = self._plan(plan_id, is_begun=bool(committed))
            for shard in committed:
                found += self._shard_files(plan_id, shard, record)
            if record is not None:
                self._check_waiting(plan_id, record)
        return found

    def _plan(self, plan_id: str, *, is_begun: bool) -> PlanRecord | None:
        self.report.num_records += 1
        path = f"plans/{plan_id}/plan.json"
        try:
            return self.catalog.plan(plan_id)
        except CatalogError as error:
            self._find(path, error, "verify with the layertap that made the plan")
        except (IntegrityError, NotFoundError) as error:
            if is_begun or isinstance(error, IntegrityError):  # else its coordinator may be about to write it
                self._find(path, error, LEAVE_PLAN)
        return None

    def _check_waiting(self, plan_id: str, record: PlanRecord) -> None:
        for shard in self.catalog.without_outcome(plan_id):
            self.report.num_records += 1
            try:
                self.catalog.shard_rows(plan_id, shard, record)
            except (IntegrityError, NotFoundError) as error:
                where = f"plans/{plan_id}/shard-{shard:05d}.arrow"
                self._find(where, error, way_out(self.store.uri, plan_id, shard))

    def _shard_files(self, plan_id: str, shard: int, record: PlanRecord | None) -> list[StoredFile]:
        way = way_out(self.store.uri, plan_id, shard)
        self.report.num_records += 2
        try:
            outcome = self.catalog.outcome(plan_id, shard)
            prefix = self.catalog.attempt_prefix(plan_id, shard, outcome.attempt)
            index = read_index(self.store, prefix, outcome)
        except (IntegrityError, NotFoundError) as error:
            self._find(f"plans/{plan_id}/state/{shard:05d}.outcome", error, way)
            return []
        if record is not None and (problem := _wrong_keys(index, outcome, record, shard)):
            self._find(f"{prefix}/{outcome.index['name']}", problem, way)
        rows = _rows_by_file(index)
        for name in rows.keys() - {file["name"] for file in outcome.files}:
            self._find(f"{prefix}/{name}", "the index names it, the outcome doesn't", way)
        return [
            StoredFile(
                path=f"{prefix}/{file['name']}",
                size=file["size"],
                checksum=file["checksum"],
                rows=rows.get(file["name"], ()),
                drawn=rows.get(file["name"], ()),
                outcome=outcome,
                way_out=way,
            )
            for file in outcome.files
        ]

    def check_versions(self) -> dict[int, set[str]]:
        """Check each version's record and table.

        Returns:
            Number -> files it names, of the newest version and of the newest complete one, which readers get.
        """
        versions, named = Versions(self.store), dict[int, set[str]]()
        numbers, complete = versions.numbers(), versions.latest()
        in_use = {*numbers[-1:], *([complete.number] if complete else [])}
        for number in numbers:
            self.report.num_records += 2
            way = RUN_AGAIN if number in in_use else f"{RESTORE}, or remove it with `layertap prune`"
            try:
                names = versions.files(number)
            except (IntegrityError, NotFoundError) as error:
                self._find(_version(number), error, way)
                continue
            if names is None:
                self.report.pruned.append(number)
            elif number in in_use:
                named[number] = names
        return named

    def check_named(self, named: dict[int, set[str]], files: list[StoredFile]) -> None:
        """Check that versions in use name only files that count."""
        there = {file.path for file in files}
        for number, names in named.items():
            if gone := names - there:
                what = f"it names {len(gone):,} files that no outcome names, such as {min(gone)}"
                self._find(_version(number), what, RUN_AGAIN)

    def check_target(self) -> None:
        """Read what lies of the target beside the states, whole."""
        from layertap import canary
        from layertap.target_files import RECORD, TargetFiles

        with suppress(NotFoundError):  # no lane has begun
            try:
                canary.read_canary(self.store)
            except IntegrityError as error:
                self._find(canary.CANARY, error, canary.way_out(self.store.uri))
            self.report.num_records += 1
        if not self.store.exists(RECORD):  # no lane has begun
            return
        way = (
            f"remove {self.store.uri}/{RECORD} and start a run with a row that isn't stored yet: its first "
            "lane writes these files anew"
        )
        try:
            files = TargetFiles(self.store)
        except IntegrityError as error:
            return self._find(RECORD, error, way)
        for name in files.record.files:
            self.report.num_records += 1
            try:
                files.check(name)
            except (NotFoundError, IntegrityError) as error:
                self._find(f"target/{name}", error, way)

    def check_whole(self, file: StoredFile) -> None:
        """Read a file whole: its size and checksum, its header, every row."""
        self._check(file, self._wrong_whole, file.size)

    def check_rows(self, file: StoredFile) -> None:
        """Check the size of a file, its header and the drawn rows, each read as a range."""
        self._check(file, self._wrong_rows, sum(row.nbytes for row in file.drawn))

    def _check(self, file: StoredFile, wrong: Callable[[StoredFile], list[Wrong]], num_bytes: int) -> None:
        """Name what is wrong with a file whenever it is read: bytes may be damaged on their way, once."""
        try:
            found = wrong(file) and wrong(file)
        except NotFoundError as error:  # any other error is the store's, and says nothing of the file
            return self._find(file.path, error, file.way_out)
        for where, problem in found:
            self._find(where, problem, file.way_out)
        with self._lock:
            self.report.num_files += 1
            self.report.num_rows += len(file.drawn)
            self.report.num_bytes += num_bytes

    def _wrong_whole(self, file: StoredFile) -> list[Wrong]:
        data, found = self.store.get(file.path), list[Wrong]()
        if len(data) != file.size or checksum(data) != file.checksum:
            said = (
                f"{len(data)} bytes with {checksum(data)}, but written were {file.size} with {file.checksum}"
            )
            found.append((file.path, said))
        if problem := wrong_header(data, len(data), file, self.spec):
            found.append((file.path, problem))
        view = memoryview(data)
        for row in file.rows:
            found += self._wrong_row(file, row, view[row.offset : row.offset + row.nbytes])
        return found

    def _wrong_rows(self, file: StoredFile) -> list[Wrong]:
        size, found = self.store.head(file.path).size, list[Wrong]()
        if size != file.size:
            found.append((file.path, f"{size} bytes, but written were {file.size}"))
        try:
            header = self.store.get_range(file.path, 0, file.rows[0].offset)
            if problem := wrong_header(header, file.size, file, self.spec):
                found.append((file.path, problem))
            for row in file.drawn:
                found += self._wrong_row(file, row, self.store.get_range(file.path, row.offset, row.nbytes))
        except IntegrityError as error:  # it ends before
            found.append((file.path, error))
        return found

    def _wrong_row(self, file: StoredFile, row: StoredRow, data: Buffer) -> list[Wrong]:
        problem = wrong_row(row, data, self.spec)
        return [(f"{file.path} row {row.key.hex()}", problem)] if problem else []


def _version(number: int) -> str:
    return f"versions/{number}.json"


def _wrong_keys(index: pa.Table, outcome: Outcome, record: PlanRecord, shard: int) -> str | None:
    """Whether stored and refused rows together aren't those of the shard."""
    planned = record.shards[shard]
    refused = np.frombuffer(bytes.fromhex("".join(row["key"] for row in outcome.refused)), np.uint8)
    stored = keys_of(index["extraction_key"].combine_chunks())
    keys = np.concatenate([stored, refused.reshape(-1, KEY_BYTES)])
    if (len(keys), keys_xor(keys)) == (planned.num_rows, planned.keys_xor):
        return None
    return (
        f"{len(stored)} rows stored and {len(outcome.refused)} refused aren't the {planned.num_rows} planned"
    )


def _rows_by_file(index: pa.Table) -> dict[str, tuple[StoredRow, ...]]:
    rows: dict[str, list[StoredRow]] = {}
    columns: Any = [index[name].to_pylist() for name in index.schema.names]
    for values in zip(*columns, strict=True):
        named = dict(zip(index.schema.names, values, strict=True))
        row = StoredRow(
            key=named["extraction_key"],
            num_tokens=named["num_tokens"],
            offset=named["offset"],
            nbytes=named["nbytes"],
            crc64nvme=named["crc64nvme"],
        )
        rows.setdefault(named["file"], []).append(row)
    return {name: tuple(sorted(of_file, key=lambda row: row.offset)) for name, of_file in rows.items()}
