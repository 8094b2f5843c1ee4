"""What may go from a root: what dead writers left, and versions that nobody wants any more.

A file goes only if its shard is settled, so that no lane that wakes up can commit it, and if no version, and
no table of one that is being published, names it.
"""

import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from io import BytesIO

import pyarrow as pa
import pyarrow.parquet as pq

from layertap import fidelity
from layertap.background import at_once
from layertap.catalog import DATA_OBJECT, HAS_ENDED, SHARD_FILE, Catalog
from layertap.errors import FormatError, IntegrityError, NotFoundError, StoreError, StoreRefusedError
from layertap.settled import void_command
from layertap.shard_state import ShardState
from layertap.store import ObjectInfo, Store, Upload
from layertap.versions import RECORD, Versions, files_of

BEING_PUBLISHED = timedelta(hours=1)
"""A table younger than this may be one whose record is about to be written."""

OWN = re.compile(r"(plans|versions|target|reports|runs|results|check)/|layertap\.json#")
"""What lies in a root by layertap's hand; users may have files of their own beside it."""

UNREADABLE = (
    "So it can't be told what may go: restore it from a copy, or start the run again, which publishes a new "
    "version, and then remove this one with `layertap prune`"
)

MAX_NAMED = 100
"""So many shards a command names."""

DELETED_AT_ONCE = 1000
"""As many as a request to S3 may name."""

LIFECYCLE_RULE = "let a lifecycle rule abort incomplete ones"


@dataclass(kw_only=True)
class Garbage:
    """What may go, and why."""

    store: Store
    reasons: dict[str, str] = field(default_factory=dict)
    """Path of an object -> why it may go."""

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
        """Delete all that the store lets go; each upload that can't be aborted is noted.

        Raises:
            StoreRefusedError: objects or uploads stay; says how many, which is the first of them, and why.
            StoreError: the store is away; nothing more was tried.
        """
        records = {path for path in self.reasons if RECORD.fullmatch(path)}
        tables = {path for path in self.reasons if path.startswith("versions/") and path.endswith(".parquet")}
        refusals = _delete(self.store, sorted(records))
        # a version whose table is gone would be damaged, a table without a version is only litter
        stay = tables if refusals else set()
        refusals += _delete(self.store, [path for path in self.reasons if path not in records | stay])
        open_uploads = self._abort_uploads()
        if refusals:
            and_tables = f", and {len(stay):,} tables stay with their versions" if stay else ""
            raise StoreRefusedError(
                f"{len(refusals):,} of {len(self.reasons):,} objects can't be deleted{and_tables}. Mend "
                f"that, and do the same again. The first of them: {refusals[0]}"
            )
        if open_uploads:
            raise StoreRefusedError(
                f"{len(open_uploads):,} of {len(self.uploads):,} multipart uploads can't be aborted, the "
                f"rest is gone. The first of them: {open_uploads[0]}"
            )

    def _abort_uploads(self) -> list[StoreRefusedError]:
        """Abort what the store lets go, note what stays, and return why."""
        refusals = list[StoreRefusedError]()
        for upload in self.uploads:
            try:
                self.store.abort(upload)
            except StoreRefusedError as error:
                refusals.append(error)
        self.notes += [f"a multipart upload stays ({error}): {LIFECYCLE_RULE}" for error in refusals]
        return refusals


def _delete(store: Store, paths: Sequence[str]) -> list[StoreRefusedError]:
    """Delete what the store lets go, and return why each of the others stays."""
    chunks = [paths[k : k + DELETED_AT_ONCE] for k in range(0, len(paths), DELETED_AT_ONCE)]
    return [refusal for chunk in chunks for refusal in _refused(store, chunk)]


def _refused(store: Store, paths: Sequence[str]) -> list[StoreRefusedError]:
    """As `_delete`, at first in a single request."""
    try:
        store.delete(paths)
    except StoreRefusedError as error:
        if len(paths) == 1:
            return [error]
        found = at_once(lambda path: _refused(store, [path]), paths)  # which it was the store needn't say
        return [refusal for refusals in found.values() for refusal in refusals]
    return []


def find_garbage(store: Store, *, older_than: timedelta = timedelta(hours=24)) -> Garbage:
    """What nothing names and nobody has touched for a while.

    Raises:
        CatalogError: there is no root.
        IntegrityError: a version or an outcome is damaged, so it can't be told what it names.
    """
    catalog, garbage = Catalog(store), Garbage(store=store)
    catalog.root()
    now = store_time(store)
    before = now - older_than
    _add_tries(garbage, catalog, before, young=now - BEING_PUBLISHED)
    _add_rows(garbage, catalog, before)
    for found in store.temporary_files():
        if found.modified_at < before and OWN.match(found.path):
            garbage.add(found, "left by a writer that died")
    for found in store.list("check"):
        if found.modified_at < before:
            garbage.add(found, "left by a check that died")
    _add_uploads(garbage, before)
    return garbage


def store_time(store: Store) -> datetime:
    """The time of day by the store's clock, by which its objects have their ages; at most this host's."""
    path = f"check/{secrets.token_hex(8)}"
    store.put(path, b"")
    try:
        written_at = store.head(path).modified_at
    finally:
        store.delete([path])
    return min(datetime.now(UTC), written_at + timedelta(seconds=1))  # some stores tell whole seconds


@dataclass(frozen=True, kw_only=True)
class _Try:
    """Files of a try of a shard that is not the committed one."""

    plan_id: str
    shard: int
    state: ShardState
    files: list[ObjectInfo]

    def is_idle(self, named: set[str], before: datetime) -> bool:
        """Whether nothing names its files and nobody has touched them for a while."""
        return max(f.modified_at for f in self.files) < before and not any(
            f.path in named for f in self.files
        )


def _add_tries(garbage: Garbage, catalog: Catalog, before: datetime, *, young: datetime) -> None:
    tries = [t for plan_id in catalog.store.folders("plans") for t in _uncommitted(catalog, plan_id)]
    # what is named after the states: who publishes looks at them once more when a table stands
    named = _named(catalog.store, young)
    idle = [t for t in tries if t.is_idle(named, before)]
    waiting: dict[str, list[int]] = defaultdict(list)
    for t in idle:
        if t.state in HAS_ENDED:
            for found in t.files:
                garbage.add(found, f"shard {t.shard} is {t.state}, and no version names this try")
        else:
            waiting[t.plan_id].append(t.shard)
    for plan_id, shards in waiting.items():
        way = _void(catalog.store, plan_id, {*shards})
        garbage.notes.append(
            f"plan {plan_id}: {len(shards)} tries are of shards without an outcome, so a lane might still "
            f"commit them. Finish the run, or withdraw the shards with {way}"
        )


def _void(store: Store, plan_id: str, shards: Collection[int] | None) -> str:
    """The command that withdraws shards, of many the first; None stands for all."""
    named = None if shards is None else sorted(shards)[:MAX_NAMED]
    rest = f", the first {MAX_NAMED} of {len(shards):,}" if shards and len(shards) > MAX_NAMED else ""
    return f"`{void_command(store.uri, plan_id, named)}`{rest}"


def _uncommitted(catalog: Catalog, plan_id: str) -> list[_Try]:
    states = catalog.states(plan_id)
    tries: dict[tuple[int, str], list[ObjectInfo]] = {}
    for found in catalog.store.list(f"plans/{plan_id}/data"):
        if match := DATA_OBJECT.fullmatch(found.path):
            tries.setdefault((int(match[2]), match[3]), []).append(found)
    committed = {
        (k, catalog.outcome(plan_id, k).attempt)
        for k in {shard for shard, _ in tries}
        if states.get(k) == ShardState.COMMITTED
    }
    return [
        _Try(plan_id=plan_id, shard=k, state=states.get(k, ShardState.WAITING), files=files)
        for (k, attempt), files in tries.items()
        if (k, attempt) not in committed
    ]


def _add_rows(garbage: Garbage, catalog: Catalog, before: datetime) -> None:
    """Rows to compute of plans without a record, whose planner died, or sleeps and will write it."""
    store = catalog.store
    for plan_id in sorted({*store.folders("plans")} - {*catalog.plans()}):
        states, waiting = catalog.states(plan_id), set[int]()
        for found in store.list(f"plans/{plan_id}"):
            match = SHARD_FILE.fullmatch(found.path.rpartition("/")[2])
            if match and found.modified_at < before:
                state = states.get(int(match[1]))
                if state == ShardState.VOID:
                    garbage.add(found, f"rows of shard {match[1]}, which is void, of a plan without a record")
                elif state != ShardState.COMMITTED:
                    waiting.add(int(match[1]))
        if waiting:
            garbage.notes.append(_about_rows(store, plan_id, waiting, {*states.values()}))


def _about_rows(store: Store, plan_id: str, waiting: Collection[int], states: Collection[ShardState]) -> str:
    """What to do about the rows of a plan without a record, which no run completes once a shard has ended."""
    ways = "Start the run again, which may complete it, or withdraw them"
    if any(state in HAS_ENDED for state in states):
        ways = "Runs plan them anew: withdraw them"
    them = waiting if ShardState.COMMITTED in states else None
    return (
        f"plan {plan_id} has no record, and rows of {len(waiting):,} shards. {ways} with "
        f"{_void(store, plan_id, them)}"
    )


def _named(store: Store, young: datetime) -> set[str]:
    """Files that versions name, and tables that are about to become those of versions."""
    versions, named = Versions(store), set[str]()
    for found in store.list("versions"):  # before the records, or one that gets its record now is missed
        if found.path.endswith(".parquet") and found.modified_at >= young:
            named |= _files_of(store, found.path)
    for number in versions.numbers():
        try:
            named |= versions.files(number) or set()
        except (IntegrityError, NotFoundError) as error:
            raise IntegrityError(f"{error}. {UNREADABLE}") from error
    return named


def _files_of(store: Store, path: str) -> set[str]:
    """Files that a table names which may have no record yet; none if it is pruned meanwhile."""
    try:
        return files_of(pq.read_table(BytesIO(store.get(path)), columns=["file"]))
    except NotFoundError:
        return set()
    except pa.ArrowInvalid as error:
        raise IntegrityError(
            f"{store.uri}/{path} is damaged: {error}. `layertap prune` removes it when it is an hour old"
        ) from error


def _add_uploads(garbage: Garbage, before: datetime) -> None:
    try:
        uploads = garbage.store.open_uploads()
    except StoreError as error:
        garbage.notes.append(f"multipart uploads can't be listed ({error}): {LIFECYCLE_RULE}")
        return
    garbage.uploads += [u for u in uploads if u.begun_at < before and OWN.match(u.path)]


def old_versions(store: Store, *, num_kept: int) -> Garbage:
    """All versions but the newest `num_kept` and the newest complete one, with their tables and checks.

    Tables that no version names go too, and checks of versions that are gone.

    Raises:
        CatalogError: there is no root.
        FormatError: a version that stays was written by a newer major format.
    """
    Catalog(store).root()
    versions, garbage = Versions(store), Garbage(store=store)
    numbers, latest = versions.numbers(), versions.latest()
    old = {*numbers[:-num_kept]} - ({latest.number} if latest else set())
    of_old = {_table(versions, number) for number in old}
    objects = store.list("versions")
    # records after the objects: what was published meanwhile stays, and so does its table
    there = versions.numbers()
    kept = [versions.find_whole(number) for number in there if number not in old]
    stays = {version.rows["path"] for version in kept if version}
    # of a damaged record it can't be told which table is its own, and a copy may restore it
    begun = datetime.min.replace(tzinfo=UTC) if None in kept else store_time(store) - BEING_PUBLISHED
    stays |= {found.path for found in objects if found.modified_at >= begun} - of_old
    for found in objects:
        if match := RECORD.fullmatch(found.path):
            if int(match[1]) in old:
                garbage.add(found, "an older version")
        elif match := fidelity.RECORD.fullmatch(found.path):
            if int(match[1]) in old or int(match[1]) not in there:
                garbage.add(found, "a check of an older version")
        elif found.path.endswith(".parquet") and found.path not in stays:
            garbage.add(found, "no version that stays names this table")
    return garbage


def _table(versions: Versions, number: int) -> str | None:
    """The table of a version that goes, if its record can be read."""
    try:
        version = versions.find(number)
    except (IntegrityError, FormatError):
        return None
    return str(version.rows["path"]) if version else None
