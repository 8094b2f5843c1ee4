"""A model of the protocol: in whatever order lanes, coordinators and gc act, no row is lost or doubled.

The catalog, the watcher, settling, publishing and gc are the real ones, on a folder; time and lanes are made
up. A lane may stall before any of its steps and go on much later, or never.
"""

import shutil
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from layertap import HiddenStates
from layertap.catalog import Catalog, Claim, Outcome, PlanRecord
from layertap.errors import ClaimLostError
from layertap.garbage import find_garbage, old_versions
from layertap.plan import PlanSettings, make_plan
from layertap.resume import take_up
from layertap.shard_state import ShardState
from layertap.store import Store
from layertap.versions import Versions
from layertap.watcher import Watcher
from tests.stored import dataset_of, new_catalog, plan_for, publish, some_rows, tokens_of, write_attempt

NUM_ROWS = 6
LANES = ("a", "b")
CLAIMABLE = (ShardState.WAITING, ShardState.STALE)


@dataclass
class _Lane:
    """What a lane has in hand; all that it knows of the others is in the store."""

    watcher: Watcher
    claim: Claim | None = None
    written: Outcome | None = None


class Protocol(RuleBasedStateMachine):
    @initialize(shard_tokens=st.sampled_from([100, 1000]))
    def start(self, shard_tokens: int) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.now_s = 0.0
        self.attempts = 0
        self.catalog: Catalog = new_catalog(Store.folder(self.folder / "root"))
        self.rows = some_rows(NUM_ROWS)
        self.dataset, self.scan = dataset_of(self.rows, self.folder / "rows.parquet")
        self.plan: PlanRecord = plan_for(self.dataset, self.scan, self.catalog, shard_tokens=shard_tokens)
        self.lanes = {name: self._lane() for name in LANES}
        self.committed: dict[tuple[str, int], str] = {}

    def _lane(self) -> _Lane:
        return _Lane(Watcher(self.catalog, self.plan.plan_id, beat_s=10, clock=lambda: self.now_s))

    @rule(stalled=st.sampled_from(["", *LANES]))
    def time_passes(self, stalled: str) -> None:
        """Four beats' time; a lane that stalls, or can't reach the store, doesn't beat and doesn't look."""
        for _ in range(4):
            self.now_s += 10
            for name in set(LANES) - {stalled}:
                lane = self.lanes[name]
                lane.watcher.poll()
                if lane.claim:
                    self.catalog.beat(lane.claim, {})

    @rule(name=st.sampled_from(LANES), data=st.data())
    def claim_and_write(self, name: str, data: st.DataObject) -> None:
        lane = self.lanes[name]
        free = {k: s.claim for k, s in lane.watcher.poll().items() if s.state in CLAIMABLE}
        if lane.claim is None and free:
            shard = data.draw(st.sampled_from(sorted(free)))
            plan_id = lane.watcher._plan_id
            lane.claim = self.catalog.claim(plan_id, shard, free[shard] + 1, lane=name, details={})
            if lane.claim:
                self.attempts += 1
                lane.written = write_attempt(self.catalog, lane.claim, attempt=f"{self.attempts:04d}")

    @rule(name=st.sampled_from(LANES))
    def commit(self, name: str) -> None:
        lane = self.lanes[name]
        if lane.claim and lane.written:
            place = (lane.claim.plan_id, lane.claim.shard)
            try:
                self.catalog.commit(lane.claim, lane.written)
                assert place not in self.committed, "two lanes committed one shard"
                self.committed[place] = lane.written.attempt
            except ClaimLostError:
                assert place in self.committed
            lane.claim = lane.written = None

    @rule(name=st.sampled_from(LANES))
    def fail(self, name: str) -> None:
        lane = self.lanes[name]
        if lane.claim:
            self.catalog.fail(lane.claim, {"error": "made up"})
            lane.claim = lane.written = None

    @rule(name=st.sampled_from(LANES))
    def die(self, name: str) -> None:
        self.lanes[name] = self._lane()

    @rule()
    def start_the_run_again(self) -> None:
        """A coordinator goes on with an unfinished plan of what is missing, or makes one."""
        chosen = self.scan.unique(settled=self.catalog.settled().final_keys)
        if not len(chosen):
            return
        plan = make_plan(
            self.scan.keys[chosen],
            self.scan.num_tokens[chosen],
            spec_fingerprint=self.catalog.root().spec.fingerprint,
            settings=PlanSettings(max_batch_tokens=120, shard_tokens=150),
        )
        self.plan = take_up(
            self.catalog,
            plan,
            lambda k: tokens_of(self.dataset, plan, chosen, k),
            max_batch_bytes=10**6,
        )
        for name in LANES:
            if self.lanes[name].claim is None:
                self.lanes[name] = self._lane()

    @rule(shard=st.integers(0, 5))
    def withdraw(self, shard: int) -> None:
        if shard < len(self.plan.shards):
            self.catalog.void(self.plan.plan_id, shard, reason="made up")

    @rule()
    def collect_garbage(self) -> None:
        find_garbage(self.catalog.store, older_than=timedelta(0)).delete()

    @rule()
    def prune(self) -> None:
        old_versions(self.catalog.store, num_kept=1).delete()

    @rule()
    def publish_what_is_there(self) -> None:
        versions = Versions(self.catalog.store)
        publish(self.catalog, self.dataset, self.scan, parent=versions.newest_number())

    @invariant()
    def what_counts_is_whole_and_there_once(self) -> None:
        settled = self.catalog.settled()
        assert len({bytes(key) for key in settled.keys}) == len(settled.keys)
        for name in settled.files:
            assert self.catalog.store.exists(name), f"{name} counts, but is gone"

    @invariant()
    def every_version_can_be_read(self) -> None:
        versions = Versions(self.catalog.store)
        for number in versions.numbers()[-1:]:
            read = HiddenStates(self.catalog.store, version=number)
            rows = [read[i]["row"] for i in range(len(read))]
            assert sorted(rows + read.missing["row"].to_pylist()) == list(range(NUM_ROWS))

    def teardown(self) -> None:
        """From wherever they are, lanes that work undisturbed end with every row."""
        if not hasattr(self, "folder"):
            return
        for _ in range(10):
            self.start_the_run_again()
            if len(self.catalog.settled().keys) == NUM_ROWS:
                break
            self._finish()
        version = publish(
            self.catalog, self.dataset, self.scan, parent=Versions(self.catalog.store).newest_number()
        )
        assert (version.num_stored, version.complete) == (NUM_ROWS, True)
        shutil.rmtree(self.folder)

    def _finish(self) -> None:
        for shard in self.catalog.without_outcome(self.plan.plan_id):
            number = Watcher(self.catalog, self.plan.plan_id).poll()[shard].claim + 1
            claim = self.catalog.claim(self.plan.plan_id, shard, number, lane="last", details={})
            assert claim is not None
            self.attempts += 1
            self.catalog.commit(claim, write_attempt(self.catalog, claim, attempt=f"{self.attempts:04d}"))


TestProtocol = pytest.mark.timeout(300)(Protocol.TestCase)
TestProtocol.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
