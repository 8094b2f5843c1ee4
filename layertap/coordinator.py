"""One run from the coordinator's seat: plan it, watch it in the store, publish what came of it. No GPU."""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from layertap.catalog import ROOT, Catalog, PlanRecord, Root
from layertap.errors import DatasetError, StoppedError
from layertap.findings import Findings
from layertap.host import host_name
from layertap.pause import StorePause
from layertap.plan import Plan
from layertap.preview import Preview, RunSettings
from layertap.records import now
from layertap.report import Report, Work, put_missing_rows
from layertap.resume import find_unfinished, take_up
from layertap.run_records import RunRecord, RunRecords
from layertap.shard_table import put_shard_table
from layertap.spec import FORMAT_VERSION
from layertap.store import Store
from layertap.store_check import BRIEF, check_space, check_store
from layertap.versions import Versions
from layertap.watch import Watch

_T = TypeVar("_T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run on one root, from its plan to its version."""

    run_id: str
    """Random; the run's lanes are told to stop under it."""

    catalog: Catalog
    """Gives a store up soon: the run waits for it and says so."""

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
        show: Callable[[str], None] = log.warning,
    ) -> Self:
        """Check the store and the input, then write the plan or take up an unfinished one.

        It waits for a store that is away; once that has passed the checks, also if it refuses or is full.

        Args:
            store: the root.
            settings: what to do.
            request: the same in the starter's words, kept in the root so that it can be asked for again.
            started_by: who starts it, such as a flow run's id.
            shards: of an unfinished plan, those to try again after they failed; all of them by default.
            show: told every few seconds why it waits.

        Raises:
            StoreRefusedError: the store lacks a permission, a feature or the room that the run needs.
            DatasetError, TargetError, SpecError, TooManyRefusedError: the input can't be extracted as asked.
            SpecMismatchError: the root belongs to another extraction.
            NotReadyError: several of these; all are in its message.
        """
        unchecked = StorePause(store, is_checked=False)
        preview, parent = unchecked.outlast(lambda: _checked(store, settings), show)
        catalog = Catalog(store.with_retry(BRIEF))

        def outlast(operation: Callable[[], _T]) -> _T:
            return StorePause(store).outlast(operation, show)

        rows, plan, unfinished = outlast(lambda: _to_compute(preview, catalog))
        record, cost = None, preview.estimate(plan)
        if settings.check_space:
            check_space(store, cost.data_bytes)
        root = Root(format_version=FORMAT_VERSION, spec=preview.spec, target=preview.info.to_dict())
        outlast(lambda: catalog.create_root(root))
        if len(rows):
            record = outlast(
                lambda: take_up(
                    catalog,
                    plan,
                    unfinished,
                    lambda k: preview.dataset.input_ids(int(rows[plan.rows[k]]))[: preview.spec.max_length],
                    max_batch_bytes=cost.max_batch_bytes,
                    shards=shards,
                )
            )
        table = preview.table(plan)
        if record is not None:
            how = "goes on with" if record.plan_id != plan.plan_id else "is"
            table.append(("plan", f"{how} {record.plan_id}: {len(record.shards):,} shards"))
        run_id = secrets.token_hex(8)
        told = RunRecord(
            run_id=run_id,
            plan_id=record.plan_id if record else None,
            started_at=now(),
            started_by=started_by,
            request=dict(request or {}),
        )
        outlast(lambda: RunRecords(catalog.store).put(told))
        return cls(run_id=run_id, catalog=catalog, preview=preview, plan=record, table=table, parent=parent)

    def watch(self) -> Watch:
        """Watch the run's plan."""
        assert self.plan is not None
        return Watch(self.catalog, self.plan)

    def pause(self, are_at_work: Callable[[], bool] = lambda: False) -> StorePause:
        """What lets the run wait for its store; a folder must have room for a batch file.

        Args:
            are_at_work: whether lanes run.
        """
        if self.plan is None:
            return StorePause(self.catalog.store)
        plan_id, checks_space = self.plan.plan_id, self.preview.settings.check_space
        return StorePause(
            self.catalog.store,
            self.plan.max_batch_bytes if checks_space else 0,
            count_committed=lambda: len(self.catalog.committed(plan_id)),
            are_at_work=are_at_work,
        )

    def excuse(self, lanes: Collection[str]) -> None:
        """Charge no shard with lanes that ended because the store failed."""
        if self.plan is not None:
            self.catalog.release_lanes(self.plan.plan_id, lanes)

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

        So it may be begun again at any point.

        Args:
            watch: what watched the run's plan to its end; it knows how each shard stands, of
                which the report says nothing without it.

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
            shard_table=put_shard_table(watch) if watch else "",
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


def _checked(store: Store, settings: RunSettings) -> tuple[Preview, int | None]:
    """What the run would do, and the newest version; all that forbids it is told at once."""
    found = Findings(f"host {host_name()} can't begin the run")
    with found.noted():
        check_store(store)
        # Before the dataset is read: a version published after that may be of a newer one.
        parent = Versions(store).newest_number()
    with found.noted():
        preview = Preview.make(settings)
    found.check()
    return preview, parent


def _to_compute(preview: Preview, catalog: Catalog) -> tuple[NDArray[np.int64], Plan, PlanRecord | None]:
    """The missing rows, a plan of them, and the unfinished plan that holds just these.

    It looks again where that isn't found: lanes of an earlier run, who are still at work on it, may have
    committed a shard between the two looks, and a new plan would compute again all that they have left.
    """
    rows = _missing(preview, catalog)
    while True:
        plan = preview.plan(rows)
        unfinished = find_unfinished(catalog, plan) if len(rows) else None
        if unfinished or not len(rows) or not catalog.plans():
            return rows, plan, unfinished
        rows, before = _missing(preview, catalog), rows
        if np.array_equal(rows, before):
            return rows, plan, None


def _missing(preview: Preview, catalog: Catalog) -> NDArray[np.int64]:
    """Rows that are to be extracted: before there is a root, all distinct ones."""
    return preview.missing_in(catalog) if catalog.store.exists(ROOT) else preview.scan.unique()
