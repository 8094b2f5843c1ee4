"""Shards that failed, as a person needs to see them: why, where, and how to try them again."""

import logging
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import chain
from typing import Any

from layertap.background import at_once
from layertap.catalog import Catalog, PlanRecord
from layertap.errors import IntegrityError, StoreRefusedError
from layertap.garbage import store_time
from layertap.settled import Settled, way_out
from layertap.shard_state import ShardState, ShardStatus, shard_state, unended_claims
from layertap.store import Store
from layertap.watch import Watch
from layertap.watcher import BEAT_S, BEATS_TO_STALE

log = logging.getLogger(__name__)

HOPELESS = "failed for good"
TRIED_AGAIN = "will be tried again"


@dataclass(frozen=True, kw_only=True)
class ShardFailure:
    """The last failure of a shard that has no outcome."""

    plan_id: str
    shard: int
    num_rows: int
    num_tokens: int

    state: str
    """Whether it failed for good or will be tried again."""

    num_failures: int
    num_deaths: int
    """Lanes that went silent while they held it."""

    error: str
    """The error's kind and message."""

    lane: str
    host: str
    device: str
    claim: int

    attempt: str
    """Random id of the last try; its files, if any, lie under that name."""

    num_rows_done: int
    """Rows of the shard that were extracted when it failed."""

    failed_at: str
    traceback: str

    log: str
    """The last lines that the lane had logged."""

    way_out: str
    """How its rows are computed again if they can't be read any more; empty where another try may help."""

    @property
    def reason(self) -> str:
        """The error in one line."""
        return self.error.splitlines()[0]

    def __str__(self) -> str:
        where = " on ".join(part for part in (self.lane, self.host, self.device) if part) or "an unknown lane"
        lines = [
            f"shard {self.shard} of plan {self.plan_id}: {self.reason}",
            f"  {self.state}, after {self.num_failures} errors and {self.num_deaths} silent deaths",
            f"  {self.num_rows_done:,} of {self.num_rows:,} rows were done, of {self.num_tokens:,} tokens",
            f"  on {where}, claim {self.claim}, attempt {self.attempt or 'unknown'}, {self.failed_at}",
        ]
        if self.way_out not in self.error:
            lines.append(f"  its rows can't be read any more. {self.way_out}")
        more = "\n".join(self.error.splitlines()[1:])
        parts = {"error": more, "traceback": self.traceback, "the lane's last lines": self.log}
        for title, text in parts.items():
            if text:
                lines += [f"  {title}:", *(f"    {line}" for line in text.rstrip().splitlines())]
        return "\n".join(lines)


def read_failures(
    catalog: Catalog, *, plans: Iterable[str] = (), shards: Collection[int] = ()
) -> list[ShardFailure]:
    """The failures that stand in a root: of shards without an outcome, since they were last retried.

    A shard of whose rows another plan has settled every one, as after a run with other settings, is left out.
    Whether the lane that holds a shard lives is told by the age of its last beat: by the store's clock, which
    takes a write, and with keys that may only read by this host's.

    Args:
        catalog: of the root.
        plans: of these plans; of all by default.
        shards: of these shards; of all by default.
    """
    now = cache(lambda: _time(catalog.store))
    looked_at = {plan_id: _look(catalog, plan_id, now) for plan_id in (list(plans) or catalog.plans())}
    return _read_all(catalog, {p: _failed(statuses, shards) for p, statuses in looked_at.items()})


def watched_failures(watch: Watch) -> list[ShardFailure]:
    """The failures that stood at a watch's last look, as `read_failures`."""
    return _read_all(watch.catalog, {watch.plan.plan_id: _failed(watch.statuses, ())})


def forget_failures(catalog: Catalog, plan_id: str) -> None:
    """Let every shard be tried again that has failed for good, or has if the lane that holds it is dead.

    Whether that is so would show only after three beats, and it costs a lane that lives nothing.
    """
    for shard, names in catalog.snapshot(plan_id).names.items():
        status = shard_state(names, unended_claims(names))
        if status.state == ShardState.FAILED:
            catalog.retry(plan_id, shard, status.claim)


_Statuses = Mapping[int, ShardStatus]
"""Shard -> its status."""


def _time(store: Store) -> datetime:
    """The time of day by the store's clock, or by this host's where the store lets nobody write."""
    try:
        return store_time(store)
    except StoreRefusedError as error:
        log.warning("whether lanes live is told by this host's clock, for the store tells no time: %s", error)
        return datetime.now(UTC)


def _look(catalog: Catalog, plan_id: str, now: Callable[[], datetime]) -> _Statuses:
    """The statuses of the plan's shards of which there is a state object, at a single look."""
    snapshot = catalog.snapshot(plan_id)
    unended = {k: unended_claims(names) for k, names in sorted(snapshot.names.items())}
    stale: dict[int, set[int]] = {}
    if any(unended.values()):  # only then, for to ask the store for its time takes a write
        before = now() - timedelta(seconds=BEATS_TO_STALE * BEAT_S)
        stale = {k: unended[k] for k, (_, claim) in snapshot.claims.items() if claim.modified_at < before}
    return {k: shard_state(snapshot.names[k], stale.get(k, ())) for k in unended}


def _failed(statuses: _Statuses, shards: Collection[int]) -> _Statuses:
    return {
        shard: status
        for shard, status in statuses.items()
        if status.num_failures + status.num_deaths
        and status.state not in (ShardState.COMMITTED, ShardState.VOID)
        and (not shards or shard in shards)
    }


def _read_all(catalog: Catalog, failed: Mapping[str, _Statuses]) -> list[ShardFailure]:
    if not any(failed.values()):
        return []
    settled = catalog.settled()
    found = (_of_plan(catalog, plan_id, of, settled) for plan_id, of in failed.items() if of)
    return list(chain.from_iterable(found))


def _of_plan(catalog: Catalog, plan_id: str, failed: _Statuses, settled: Settled) -> list[ShardFailure]:
    plan = catalog.find_plan(plan_id)
    if plan is None:  # this layertap doesn't go on with it: the next run plans these rows anew
        return []

    def read(shard: int) -> ShardFailure | None:
        try:
            rows = catalog.shard_rows(plan_id, shard, plan)
        except IntegrityError:  # which may be why it failed
            return _read(catalog, plan, shard, failed[shard], way_out(catalog.store.uri, plan_id, shard))
        at = settled.find(rows.keys)
        if (at >= 0).all() and settled.is_final[at].all():
            return None
        return _read(catalog, plan, shard, failed[shard], "")

    return [failure for failure in at_once(read, list(failed)).values() if failure]


def _read(catalog: Catalog, plan: PlanRecord, shard: int, status: ShardStatus, way: str) -> ShardFailure:
    plan_id, record = plan.plan_id, plan.shards[shard]
    told = catalog.last_failure(plan_id, shard, status)
    return ShardFailure(
        plan_id=plan_id,
        shard=shard,
        num_rows=record.num_rows,
        num_tokens=record.num_tokens,
        state=HOPELESS if status.state == ShardState.FAILED else TRIED_AGAIN,
        num_failures=status.num_failures,
        num_deaths=status.num_deaths,
        claim=told.get("claim", status.claim),
        num_rows_done=told.get("num_rows", 0),
        way_out=way,
        **_texts(told),
    )


def _texts(told: dict[str, Any]) -> dict[str, str]:
    names = ("error", "lane", "host", "device", "attempt", "failed_at", "traceback", "log")
    return {name: str(told.get(name, "")) for name in names}


def markdown(
    failures: Collection[ShardFailure], uri: str, *, at_most: int, pages: Mapping[str, str] | None = None
) -> str:
    """Failures for a page: a table, then each with its traceback and log.

    Args:
        failures: of a root.
        uri: the root's address.
        at_most: how many are shown; the rest is counted.
        pages: name of a lane -> address of its page.
    """
    shown = list(failures)[:at_most]
    lines = [f"{len(failures):,} shards of {uri} failed.", ""]
    if not all(failure.way_out for failure in failures):
        lines += [
            "To try them again: **Retry** on this run, the deployment `retry-failed-shards` with this root, "
            "or",
            "",
            f"    layertap retry {shlex.quote(uri)}",
            "",
            "Only what is missing is computed, with any number of lanes.",
            "",
        ]
    lines += ["| shard | why | last lane |", "| --- | --- | --- |"]
    lanes = {lane: f"[{lane}]({address})" for lane, address in (pages or {}).items()}
    for one in shown:
        lines.append(f"| {one.shard} | {one.reason.replace('|', '/')} | {lanes.get(one.lane, one.lane)} |")
    for one in shown:
        lines += ["", f"**Shard {one.shard}**", "", "```", str(one), "```"]
    return "\n".join(lines)
