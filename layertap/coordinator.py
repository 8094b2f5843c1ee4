"""One run from the coordinator's seat: plan it, watch it in the store, publish what came of it. No GPU."""

import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from layertap.catalog import HAS_ENDED, Catalog, PlanRecord, Root
from layertap.dataset import BLOCK_TOKENS, Columns, Scan, TokenDataset
from layertap.errors import DatasetError, SpecMismatchError, StoppedError
from layertap.lane import BEAT_S, now
from layertap.plan import Estimate, Plan, PlanSettings, estimate, make_plan
from layertap.progress import Rate, format_bytes, format_duration
from layertap.report import MAX_TABLE_ROWS, Report, Work, check_refused, put_missing_rows
from layertap.resume import take_up
from layertap.run_records import RunRecord, RunRecords
from layertap.shard_state import ShardState, ShardStatus
from layertap.spec import FORMAT_VERSION, DTypeName, ExtractionSpec, LastHiddenState
from layertap.store import Store
from layertap.target_info import TargetInfo, inspect_target
from layertap.versions import Versions
from layertap.watcher import Watcher

TRAINERS_THAT_NEED_LAST = ("speculators", "ModelOpt", "EAGLE-3 in SpecForge", "Automodel", "DeepSpec")
"""Trainers that read the last hidden state whatever their loss, so that `none` shuts them out."""

SETTLED_STATES = (*HAS_ENDED, ShardState.FAILED)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is asked to do."""

    dataset: str
    """Path of the tokenised dataset: an Arrow folder, a Parquet file or a folder of them."""

    target: str
    """Hub id or folder of the target."""

    layer_ids: tuple[int, ...]
    """0-based decoder-layer outputs."""

    revision: str | None = None
    """Hub revision of the target; None is its main branch."""

    split: str | None = None
    """Split of a dictionary of datasets."""

    columns: Columns = field(default_factory=Columns)
    """Names of the dataset's columns."""

    last_hidden_state: LastHiddenState = "pre_norm"
    dtype: DTypeName = "bfloat16"
    max_length: int = 4096

    too_long: Literal["truncate", "refuse"] = "truncate"
    """What happens to rows longer than `max_length` tokens."""

    plan: PlanSettings = field(default_factory=PlanSettings)

    max_refused_share: float = 0.01
    """Share of the dataset's rows that may be missing in the end before the run counts as failed."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A plan before it is written, and all that led to it; made without a store."""

    settings: RunSettings
    dataset: TokenDataset
    info: TargetInfo
    spec: ExtractionSpec
    scan: Scan

    @classmethod
    def make(cls, settings: RunSettings) -> Self:
        """Open the dataset, read the target's config, and check every row against it.

        Raises:
            DatasetError, TargetError, SpecError: the input can't be extracted as asked.
            TooManyRefusedError: more rows are unfit than the policy allows.
        """
        info = inspect_target(settings.target, revision=settings.revision)
        spec = ExtractionSpec(
            target_identity=info.identity,
            layer_ids=settings.layer_ids,
            last_hidden_state=settings.last_hidden_state,
            dtype=settings.dtype,
            max_length=settings.max_length,
        )
        spec.check_against(info.num_hidden_layers)
        dataset = TokenDataset.open(settings.dataset, split=settings.split, columns=settings.columns)
        scan = dataset.scan(
            vocab_size=info.vocab_size, max_length=spec.max_length, too_long=settings.too_long
        )
        check_refused(scan.refused, dataset.num_rows, settings.max_refused_share)
        info.check_length(int(scan.num_tokens.max()))
        return cls(settings=settings, dataset=dataset, info=info, spec=spec, scan=scan)

    def plan(self, rows: NDArray[np.int64] | None = None) -> Plan:
        """Cut the given rows of the dataset, or all distinct ones, into batches and shards."""
        chosen = self.scan.unique(settled=None) if rows is None else rows
        return make_plan(
            self.scan.keys[chosen],
            self.scan.num_tokens[chosen],
            spec_fingerprint=self.spec.fingerprint,
            settings=self.settings.plan,
        )

    def missing_in(self, catalog: Catalog) -> NDArray[np.int64]:
        """The rows that a root doesn't hold yet.

        Raises:
            CatalogError: there is no root.
            SpecMismatchError: the root belongs to another extraction.
        """
        if differences := catalog.root().spec.differences(self.spec):
            raise SpecMismatchError(
                f"{catalog.store.uri} belongs to another extraction ({'; '.join(differences)}): "
                "give this one a root of its own"
            )
        return self.scan.unique(settled=catalog.settled().final_keys)

    def estimate(self, plan: Plan) -> Estimate:
        """What the plan will cost."""
        return estimate(
            plan,
            spec=self.spec,
            hidden_size=self.info.hidden_size,
            num_parameters=self.info.executed_parameters(self.spec),
        )

    def table(self, plan: Plan) -> list[tuple[str, str]]:
        """The plan in rows of a name and a value, for a person."""
        cost, scan = self.estimate(plan), self.scan
        num_valid = int(np.count_nonzero(scan.num_tokens))
        num_unsupervised = num_valid - int(np.count_nonzero(scan.num_supervised))
        rows = [
            ("rows in the dataset", f"{self.dataset.num_rows:,}"),
            ("rows refused", f"{len(scan.refused):,}"),
            ("rows truncated", f"{scan.num_truncated:,} to {self.spec.max_length:,} tokens"),
            ("supervised tokens", f"{scan.num_supervised[scan.num_tokens > 0].sum(dtype=np.int64):,}"),
            ("rows without a supervised token", f"{num_unsupervised:,}"),
            (
                f"rows with too few of them for a block of {BLOCK_TOKENS}",
                f"{np.count_nonzero(scan.has_few_supervised):,}",
            ),
            ("rows stored already, or equal to another", f"{num_valid - cost.num_rows:,}"),
            ("rows to extract", f"{cost.num_rows:,}"),
            ("tokens to extract", f"{cost.num_tokens:,}"),
            ("batches in shards", f"{cost.num_batches:,} in {cost.num_shards:,}"),
            ("padding", f"{cost.padding_share:.2%}"),
            ("to be stored", format_bytes(cost.data_bytes)),
            ("store requests", f"{cost.num_requests:,}"),
            ("GPU-hours on an H200", f"{cost.gpu_hours:.2f}"),
            ("layers (0-based outputs)", ", ".join(map(str, self.spec.layer_ids))),
            ("last hidden state", self.spec.last_hidden_state),
            ("target", self.spec.target_identity),
            ("provenance of the dataset", self._provenance()),
        ]
        if not self.spec.stores_last:
            rows.append(("can't be trained on by", ", ".join(TRAINERS_THAT_NEED_LAST)))
        return rows

    def _provenance(self) -> str:
        """Who wrote the responses moves a drafter's acceptance more than any numerics: say if unknown."""
        provenance = self.dataset.provenance
        if not provenance["recorded"]:
            return "UNKNOWN: the dataset has no provenance.json"
        return f"recorded; responses by: {provenance.get('responses', 'unknown')}"


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
        """
        store.check()
        # Before the dataset is read: a version published after that may be of a newer one.
        parent = Versions(store).newest_number()
        preview = Preview.make(settings)
        catalog = Catalog(store)
        catalog.create_root(
            Root(format_version=FORMAT_VERSION, spec=preview.spec, target=preview.info.to_dict())
        )
        rows = preview.scan.unique(settled=catalog.settled().final_keys)
        plan = preview.plan(rows)
        record, cost = None, preview.estimate(plan)
        if len(rows):
            store.check_space(cost.data_bytes)
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
