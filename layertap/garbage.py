"""What may go from a root: what dead writers left, and versions that nobody wants any more.

A file goes only if its shard is settled, so that no lane that wakes up can commit it, and if no version
names it.
"""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from layertap.catalog import Catalog
from layertap.errors import StoreError, StoreRefusedError
from layertap.shard_state import ShardState
from layertap.store import ObjectInfo, Store, Upload
from layertap.versions import Version, Versions

BEING_PUBLISHED = timedelta(hours=1)
"""A table younger than this may be one whose record is about to be written."""

LIFECYCLE_RULE = "let a lifecycle rule abort incomplete ones"

DATA_OBJECT = re.compile(r"plans/[^/]+/data/(\d{5,})/([^/]+)/.+")


@dataclass(kw_only=True)
class Garbage:
    """What may go, and why."""

    store: Store
    reasons: dict[str, str] = field(default_factory=dict)
    """Path of an object -> why it may go, in the order in which it does."""

    num_bytes: int = 0
    uploads: list[Upload] = field(default_factory=list)
    """Multipart uploads that nobody ended; an object may lie under the same path."""

    notes: list[str] = field(default_factory=list)
    """What else the user should know."""

    def __str__(self) -> str:
        num_found = len(self.reasons) + len(self.uploads)
        return f"{num_found:,} to delete, {self.num_bytes / 1e9:.3g} GB"

    def add(self, found: ObjectInfo, why: str) -> None:
        """Take an object."""
        self.reasons[found.path] = why
        self.num_bytes += found.size

    def delete(self) -> None:
        """Delete all of it; uploads that the store refuses to abort are noted."""
        self.store.delete(list(self.reasons))
        for upload in self.uploads:
            try:
                self.store.abort(upload)
            except StoreRefusedError as error:
                self.notes.append(f"a multipart upload stays ({error}): {LIFECYCLE_RULE}")


def find_garbage(store: Store, *, older_than: timedelta = timedelta(hours=24)) -> Garbage:
    """What nothing names and nobody has touched for a while.

    Raises:
        CatalogError: there is no root.
        IntegrityError: a version or an outcome is damaged, so it can't be told what it names.
    """
    catalog, garbage = Catalog(store), Garbage(store=store)
    catalog.root()
    before = datetime.now(UTC) - older_than
    named = _named_by_versions(store)
    for plan_id in store.folders("plans"):
        _add_attempts(garbage, catalog, plan_id, named, before)
    for found in store.temporary_files():
        if found.modified_at < before:
            garbage.add(found, "left by a writer that died")
    _add_uploads(garbage, before)
    return garbage


def _named_by_versions(store: Store) -> set[str]:
    versions = Versions(store)
    tables = [versions.rows(versions.get(number), ["file"]) for number in versions.numbers()]
    return {name for table in tables for name in table["file"].unique().to_pylist() if name is not None}


def _add_attempts(
    garbage: Garbage, catalog: Catalog, plan_id: str, named: set[str], before: datetime
) -> None:
    states, num_waiting = catalog.states(plan_id), 0
    attempts: dict[tuple[int, str], list[ObjectInfo]] = {}
    for found in catalog.store.list(f"plans/{plan_id}/data"):
        if match := DATA_OBJECT.fullmatch(found.path):
            attempts.setdefault((int(match[1]), match[2]), []).append(found)
    committed = {
        k: catalog.outcome(plan_id, k).attempt
        for k in {shard for shard, _ in attempts}
        if states.get(k) == ShardState.COMMITTED
    }
    for (shard, attempt), files in attempts.items():
        state = states.get(shard, ShardState.WAITING)
        is_named = any(found.path in named for found in files)
        if committed.get(shard) == attempt or is_named or max(f.modified_at for f in files) >= before:
            continue
        if state in (ShardState.COMMITTED, ShardState.VOID):
            for found in files:
                garbage.add(found, f"shard {shard} is {state}, and no version names this try")
        else:
            num_waiting += 1
    if num_waiting:
        garbage.notes.append(
            f"plan {plan_id}: {num_waiting} tries are of shards without an outcome, so a lane might still "
            "commit them. Finish the run, or withdraw the shards with "
            f"`layertap void {catalog.store.uri} {plan_id} SHARD`"
        )


def _add_uploads(garbage: Garbage, before: datetime) -> None:
    try:
        uploads = garbage.store.open_uploads()
    except StoreError as error:
        garbage.notes.append(f"multipart uploads can't be listed ({error}): {LIFECYCLE_RULE}")
        return
    garbage.uploads += [upload for upload in uploads if upload.begun_at < before]


def old_versions(store: Store, *, num_kept: int) -> Garbage:
    """All versions but the newest `num_kept` and the newest complete one, and tables that no version names.

    Raises:
        CatalogError: there is no root.
        IntegrityError: the record of a version that stays is damaged.
    """
    Catalog(store).root()
    versions, garbage = Versions(store), Garbage(store=store)
    numbers, latest = versions.numbers(), versions.latest()
    before = datetime.now(UTC) - BEING_PUBLISHED
    old = {*numbers[:-num_kept]} - ({latest.number} if latest else set())
    objects = store.list("versions")
    # records after the objects: what was published meanwhile stays, and so does its table
    tables = {_table(versions.get(number)) for number in versions.numbers() if number not in old}
    for found in objects:
        name = found.path.removeprefix("versions/")
        if name.removesuffix(".json").isdigit():
            if int(name.removesuffix(".json")) in old:
                garbage.add(found, "an older version")
        elif name.endswith(".parquet") and found.path not in tables and found.modified_at < before:
            garbage.add(found, "no version that stays names this table")
    # records first: a version whose table is gone would be damaged, a table without a version is only litter
    garbage.reasons = dict(sorted(garbage.reasons.items(), key=lambda item: not item[0].endswith(".json")))
    return garbage


def _table(version: Version) -> str:
    return str(version.rows["path"])
