"""One run from the coordinator's seat: plan it, watch it in the store, publish what came of it. No GPU."""

import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from layertap.catalog import HAS_ENDED, Catalog, PlanRecord, Root
from layertap.errors import DatasetError, StoppedError
from layertap.findings import Findings
from layertap.host import host_name
from layertap.lane import BEAT_S, now
from layertap.preview import Preview, RunSettings
from layertap.progress import Rate, format_duration
from layertap.report import MAX_TABLE_ROWS, Report, Work, put_missing_rows
from layertap.resume import take_up
from layertap.run_records import RunRecord, RunRecords
from layertap.shard_state import ShardState, ShardStatus
from layertap.spec import FORMAT_VERSION
from layertap.store import Store
from layertap.store_check import check_space, check_store
from layertap.versions import Versions
from layertap.watcher import Watcher

__all__ = ["Preview", "Run", "RunProgress", "RunSettings", "Watch"]

SETTLED_STATES = (*HAS_ENDED, ShardState.FAILED)


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run is, as the store shows it."""

    num_tokens: int
    num_tokens_done: int
    num_rows: int
    num_rows_done: int
    tokens_per_s: float
    samples_per_s: float
    eta_s: float | None
    shards_by_state: dict[str, int]
    num_claimable: int
    """Shards that a further lane could take now."""

    lanes: dict[str, int]
    """Shards each live lane holds."""

    silent_lanes: frozenset[str]
    """Lanes that hold stale claims and no other."""

    shards: list[dict[str, Any]]
    """A row a shard, those that need a look first; at most 100."""

    @property
    def percent(self) -> float:
        """Share of the plan's tokens that is done, in percent."""
        return 100.0 * self.num_tokens_done / max(self.num_tokens, 1)

    @property
    def finished(self) -> bool:
        """Whether every shard has an outcome or has failed for good."""
        return sum(self.shards_by_state.values()) == sum(
            self.shards_by_state.get(state, 0) for state in SETTLED_STATES
        )

    def __str__(self) -> str:
        return (
            f"{self.num_rows_done:,} of {self.num_rows:,} rows, {self.samples_per_s:.1f} samples/s, "
            f"{self.tokens_per_s:,.0f} tokens/s, ETA {format_duration(self.eta_s)}"
        )


class Watch:
    """Looks at a plan's state in the store, again and again."""

    def __init__(self, catalog: Catalog, plan: PlanRecord) -> None:
        self.catalog = catalog
        self.plan = plan
        self._watcher = Watcher(catalog, plan.plan_id, beat_s=BEAT_S)
        self._rate = Rate()
        self._statuses: dict[int, ShardStatus] = {}
        self._endings: dict[tuple[int, ShardState, int], dict[str, str]] = {}
        self._started_at = time.monotonic()
        self._first: RunProgress | None = None

    def poll(self) -> RunProgress:
        """Look once."""
        statuses = self._watcher.poll()
        held = {
            k: self.catalog.read_claim(self.plan.plan_id, k, status.claim)
            for k, status in statuses.items()
            if status.state in (ShardState.CLAIMED, ShardState.STALE)
        }
        lanes = Counter(c["lane"] for k, c in held.items() if statuses[k].state == ShardState.CLAIMED)
        rows = [self._row(k, statuses[k], held.get(k, {})) for k in range(len(self.plan.shards))]
        self._statuses = statuses
        tokens_done = sum(row["tokens done"] for row in rows)
        rows_done = sum(row["rows done"] for row in rows)
        self._rate.update(tokens_done, rows_done)
        states = Counter(str(status.state) for status in statuses.values())
        shown = sorted(rows, key=lambda row: (ATTENTION.index(row["state"]), row["shard"]))[:MAX_TABLE_ROWS]
        progress = RunProgress(
            num_tokens=self.plan.num_tokens,
            num_tokens_done=tokens_done,
            num_rows=self.plan.num_rows,
            num_rows_done=rows_done,
            tokens_per_s=self._rate.tokens_per_s,
            samples_per_s=self._rate.samples_per_s,
            eta_s=self._rate.eta_s(self.plan.num_tokens - tokens_done),
            shards_by_state=dict(states),
            num_claimable=states[ShardState.WAITING] + states[ShardState.STALE],
            lanes=dict(lanes),
            silent_lanes=frozenset(claim["lane"] for claim in held.values()) - lanes.keys(),
            shards=[{**row, **self._ended(row["shard"])} for row in shown],
        )
        self._first, self._last = self._first or progress, progress
        return progress

    def work(self, bytes_per_token: int) -> Work:
        """What was computed between the first look and the last."""
        assert self._first is not None
        num_tokens = self._last.num_tokens_done - self._first.num_tokens_done
        return Work(
            num_rows=self._last.num_rows_done - self._first.num_rows_done,
            num_tokens=num_tokens,
            num_bytes=num_tokens * bytes_per_token,
            elapsed_s=time.monotonic() - self._started_at,
        )

    def failures(self) -> dict[int, str]:
        """Shards that had failed for good at the last look, with their last error."""
        failed = [k for k, status in self._statuses.items() if status.state == ShardState.FAILED]
        return {k: self.catalog.last_failure(self.plan.plan_id, k)["error"] for k in failed}

    def _ended(self, shard: int) -> dict[str, str]:
        """The lane of a shard that is settled, and the first line of a failure's error; each is read once."""
        status, plan_id = self._statuses[shard], self.plan.plan_id
        if status.state not in (ShardState.COMMITTED, ShardState.FAILED):
            return {}
        key = (shard, status.state, status.claim)
        if key not in self._endings:
            if status.state == ShardState.COMMITTED:
                ending = {"lane": self.catalog.outcome(plan_id, shard).lane}
            else:
                failure = self.catalog.last_failure(plan_id, shard)
                ending = {"lane": failure.get("lane", ""), "error": failure["error"].splitlines()[0]}
            self._endings[key] = ending
        return self._endings[key]

    def _row(self, shard: int, status: ShardStatus, claim: dict[str, Any]) -> dict[str, Any]:
        record = self.plan.shards[shard]
        whole = status.state == ShardState.COMMITTED
        return {
            "shard": shard,
            "state": str(status.state),
            "lane": claim.get("lane", ""),
            "error": "",
            "claims": status.claim,
            "failures": status.num_failures,
            "rows": record.num_rows,
            "rows done": record.num_rows if whole else claim.get("num_rows", 0),
            "tokens": record.num_tokens,
            "tokens done": record.num_tokens if whole else claim.get("num_tokens", 0),
        }


ATTENTION = [
    ShardState.FAILED,
    ShardState.STALE,
    ShardState.CLAIMED,
    ShardState.WAITING,
    ShardState.VOID,
    ShardState.COMMITTED,
]
"""States in the order in which a person wants to see their shards."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run on one root, from its plan to its version."""

    run_id: str
    """Random; the run's lanes are told to stop under it."""

    catalog: Catalog
    preview: Preview
    plan: PlanRecord | None
    """None when everything is stored already."""

    table: list[tuple[str, str]]
    parent: int | None
    """The newest version when the run was planned."""

    @classmethod
    def prepare(
        cls,
        store: Store,
        settings: RunSettings,
        *,
        request: Mapping[str, Any] | None = None,
        started_by: str = "",
        shards: Collection[int] = (),
    ) -> Self:
        """Check the store and the input, then write the plan or take up an unfinished one.

        Args:
            store: the root.
            settings: what to do.
            request: the same in the starter's words, kept in the root so that it can be asked for again.
            started_by: who starts it, such as a flow run's id.
            shards: of an unfinished plan, those to try again after they failed; all of them by default.

        Raises:
            StoreRefusedError: the store lacks a permission, a feature or the room that the run needs.
            DatasetError, TargetError, SpecError, TooManyRefusedError: the input can't be extracted as asked.
            SpecMismatchError: the root belongs to another extraction.
            NotReadyError: several of these; all are in its message.
        """
        found = Findings(f"host {host_name()} can't begin the run")
        with found.noted():
            check_store(store)
            # Before the dataset is read: a version published after that may be of a newer one.
            parent = Versions(store).newest_number()
        with found.noted():
            preview = Preview.make(settings)
        found.check()
        catalog = Catalog(store)
        catalog.create_root(
            Root(format_version=FORMAT_VERSION, spec=preview.spec, target=preview.info.to_dict())
        )
        rows = preview.scan.unique(settled=catalog.settled().final_keys)
        plan = preview.plan(rows)
        record, cost = None, preview.estimate(plan)
        if len(rows):
            check_space(store, cost.data_bytes)
            record = take_up(
                catalog,
                plan,
                lambda k: preview.dataset.input_ids(int(rows[plan.rows[k]]))[: preview.spec.max_length],
                max_batch_bytes=cost.max_batch_bytes,
                shards=shards,
            )
        table = preview.table(plan)
        if record is not None:
            how = "goes on with" if record.plan_id != plan.plan_id else "is"
            table.append(("plan", f"{how} {record.plan_id}: {len(record.shards):,} shards"))
        run_id = secrets.token_hex(8)
        RunRecords(store).put(
            RunRecord(
                run_id=run_id,
                plan_id=record.plan_id if record else None,
                started_at=now(),
                started_by=started_by,
                request=dict(request or {}),
            )
        )
        return cls(run_id=run_id, catalog=catalog, preview=preview, plan=record, table=table, parent=parent)

    def watch(self) -> Watch:
        """Watch the run's plan."""
        assert self.plan is not None
        return Watch(self.catalog, self.plan)

    def stop(self) -> None:
        """Tell every lane to end at its next beat."""
        if self.plan is not None:
            self.catalog.stop(self.plan.plan_id, self.run_id)

    def check_stopped(self) -> None:
        """Raise StoppedError when somebody told the run's lanes to end."""
        if self.plan is not None and self.catalog.stopping(self.plan.plan_id, self.run_id):
            raise StoppedError(f"run {self.run_id} was told to stop; what is committed stays")

    def publish(self, watch: Watch | None = None) -> Report:
        """Publish the version of the dataset that the store now holds; the same store gives the same version.

        Args:
            watch: what watched the run's plan to its end; it knows the shards that failed.

        Raises:
            DatasetError: the dataset's files were overwritten during the run.
            CatalogError: a newer dataset was published meanwhile.
        """
        self._check_dataset_unchanged()
        versions, preview = Versions(self.catalog.store), self.preview
        version = versions.publish(preview.dataset, preview.scan, self.catalog.settled(), parent=self.parent)
        bytes_per_token = preview.spec.bytes_per_token(preview.info.hidden_size)
        return Report(
            uri=self.catalog.store.uri,
            version=version,
            num_rows=preview.dataset.num_rows,
            missing=versions.missing(version),
            missing_rows=put_missing_rows(self.catalog.store, version),
            failures=watch.failures() if watch else {},
            work=watch.work(bytes_per_token) if watch else Work(),
        )

    def _check_dataset_unchanged(self) -> None:
        settings, spec = self.preview.settings, self.preview.spec
        self.preview.dataset.check_unchanged()  # a mapping that was cut short must not be touched
        scan = self.preview.dataset.scan(
            vocab_size=self.preview.info.vocab_size, max_length=spec.max_length, too_long=settings.too_long
        )
        if scan.fingerprint != self.preview.scan.fingerprint:
            raise DatasetError(
                f"{settings.dataset} was overwritten while the run went on: masks and ids of the planned "
                "rows are gone. What was computed is stored; start the run again on the new dataset"
            )
