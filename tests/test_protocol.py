"""A model of the protocol: in whatever order lanes, coordinators and gc act, no row is lost or doubled.

The catalog, the watcher, settling, publishing and gc are the real ones, on a folder; time and lanes are made
up. A lane may stall before any of its steps and go on much later, or never; so may whoever publishes, prunes
or collects garbage, before any list and any write. That the model tells a broken protocol from a right one is
shown on broken ones.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from layertap.catalog import HAS_ENDED, Catalog, Claim, Outcome, PlanRecord
from layertap.errors import CatalogError, ClaimLostError, IntegrityError
from layertap.garbage import find_garbage, old_versions
from layertap.records import MEMORY
from layertap.resume import find_unfinished, take_up
from layertap.shard_state import ShardState
from layertap.store import Buffer, Store
from layertap.versions import Versions
from layertap.watcher import BEATS_TO_STALE, Watcher
from tests.actors import Actor
from tests.stored import (
    dataset_of,
    new_catalog,
    plan_for,
    plan_of_missing,
    publish,
    some_rows,
    tokens_of,
    write_attempt,
)

NUM_ROWS = 6
LANES = ("a", "b")
CLAIMABLE = (ShardState.WAITING, ShardState.STALE)

MAX_ACTORS = 3
TO_THE_END = 1000
STEPS = st.sampled_from([1, 2, 4, 6, 8, TO_THE_END])
"""Requests that somebody does before others act."""

HAS_READ = 5
"""Requests after which who publishes knows what is stored, and has written nothing yet."""


@dataclass
class _Lane:
    """What a lane has in hand; all that it knows of the others is in the store."""

    watcher: Watcher
    claim: Claim | None = None
    written: Outcome | None = None


class Protocol(RuleBasedStateMachine):
    store_type: type[Store] = Store

    @initialize(
        shard_tokens=st.sampled_from([100, 150, 1000]),
        num_stored=st.integers(0, 2),
        published=st.sampled_from([0, HAS_READ, TO_THE_END]),
    )
    def start(self, shard_tokens: int, num_stored: int, published: int) -> None:
        """Some shards are stored already, and perhaps published, or about to be.

        With 150 tokens a shard the plan is one that later runs go on with.
        """
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.now_s = 0.0
        self.attempts = 0
        self.catalog: Catalog = new_catalog(self.store_type.folder(self.folder / "root"))
        self.rows = some_rows(NUM_ROWS)
        self.dataset, self.scan = dataset_of(self.rows, self.folder / "rows.parquet")
        self.plan: PlanRecord = plan_for(self.dataset, self.scan, self.catalog, shard_tokens=shard_tokens)
        self.lanes = {name: self._lane() for name in LANES}
        self.committed: dict[tuple[str, int], str] = {}
        self.actors: list[Actor] = []
        self.num_withdrawn = 0
        for shard in range(min(num_stored, len(self.plan.shards))):
            self._claim_and_write(self.lanes["a"], "a", shard, has_memory=True)
            self._commit("a")
        self._act(self._publish, published)

    def _at_work(self) -> list[str]:
        return [name for name in LANES if self.lanes[name].claim]

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

    @rule(name=st.sampled_from(LANES), has_memory=st.booleans(), data=st.data())
    def claim_and_write(self, name: str, has_memory: bool, data: st.DataObject) -> None:
        lane = self.lanes[name]
        free = [k for k, s in lane.watcher.poll().items() if s.state in CLAIMABLE]
        if lane.claim is None and free:
            self._claim_and_write(lane, name, data.draw(st.sampled_from(free)), has_memory)

    @precondition(lambda self: len(self._at_work()) == 1)
    @rule(wakes=st.booleans())
    def overtake(self, wakes: bool) -> None:
        """The lane that works stalls for so long that the idle one takes its shard over; it may wake up."""
        (stalled,) = self._at_work()
        (idle,) = set(LANES) - {stalled}
        self.time_passes(stalled)
        claim, lane = self.lanes[stalled].claim, self.lanes[idle]
        assert claim is not None
        if lane.watcher._plan_id == claim.plan_id and (
            lane.watcher.poll()[claim.shard].state == ShardState.STALE
        ):
            self._claim_and_write(lane, idle, claim.shard, has_memory=True)
            if wakes and lane.claim:
                self._commit(stalled)
                self._commit(idle)

    def _claim_and_write(self, lane: _Lane, name: str, shard: int, has_memory: bool) -> None:
        plan_id, number = lane.watcher._plan_id, lane.watcher.poll()[shard].claim + 1
        lane.claim = self.catalog.claim(plan_id, shard, number, lane=name, details={})
        if lane.claim:
            self.attempts += 1
            first_key = self.catalog.shard_rows(plan_id, shard).keys[0].tobytes()
            lane.written = write_attempt(
                self.catalog,
                lane.claim,
                attempt=f"{self.attempts:04d}",
                refused=() if has_memory else [first_key],
                fault=MEMORY,
            )

    @precondition(lambda self: self._at_work())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(self._at_work())))

    def _commit(self, name: str) -> None:
        lane = self.lanes[name]
        assert lane.claim is not None and lane.written is not None
        place = (lane.claim.plan_id, lane.claim.shard)
        try:
            self.catalog.commit(lane.claim, lane.written)
            assert place not in self.committed, "two lanes committed one shard"
            self.committed[place] = lane.written.attempt
        except ClaimLostError:
            assert place in self.committed
        lane.claim = lane.written = None

    @precondition(lambda self: self._at_work())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self._fail(data.draw(st.sampled_from(self._at_work())))

    @precondition(lambda self: not self._at_work())
    @rule(shard=st.integers(0, 5))
    def fail_on_both_lanes(self, shard: int) -> None:
        """No lane takes the shard any more, until the run is started again."""
        for name, lane in self.lanes.items():
            status = lane.watcher.poll().get(shard)
            if status and status.state in CLAIMABLE:
                self._claim_and_write(lane, name, shard, has_memory=True)
                self._fail(name)

    def _fail(self, name: str) -> None:
        lane = self.lanes[name]
        assert lane.claim is not None
        self.catalog.fail(lane.claim, {"error": "made up"})
        lane.claim = lane.written = None

    @precondition(lambda self: self._at_work())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._at_work()))
        self.lanes[name] = self._lane()

    @rule()
    def start_the_run_again(self) -> None:
        """A coordinator goes on with an unfinished plan of what is missing, or makes one."""
        chosen, plan = plan_of_missing(self.scan, self.catalog, shard_tokens=150)
        if not len(chosen):
            return
        self.plan = take_up(
            self.catalog,
            plan,
            find_unfinished(self.catalog, plan),
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
            self.num_withdrawn += 1

    @precondition(lambda self: self.committed)
    @rule(publish=st.booleans(), collect=st.booleans(), wake=st.booleans(), data=st.data())
    def withdraw_what_is_stored(self, publish: bool, collect: bool, wake: bool, data: st.DataObject) -> None:
        """Perhaps while it is being published; gc has time to take all it may, and those who stalled wake."""
        if publish:
            self._act(self._publish, HAS_READ)
        plan_id, shard = data.draw(st.sampled_from(sorted(self.committed)))
        self.catalog.void(plan_id, shard, reason="made up")
        self.num_withdrawn += 1
        if collect:
            self._collect(self.catalog.store)
        while wake and self.actors:
            self.actors.pop(0).go_on(TO_THE_END)

    @rule(steps=STEPS)
    def collect_garbage(self, steps: int) -> None:
        self._act(self._collect, steps)

    def _collect(self, store: Store) -> None:
        find_garbage(store, older_than=timedelta(0)).delete()

    @rule(steps=STEPS)
    def prune(self, steps: int) -> None:
        self._act(lambda store: old_versions(store, num_kept=1).delete(), steps)

    @rule(steps=STEPS)
    def publish_what_is_there(self, steps: int) -> None:
        self._act(self._publish, steps)

    def _publish(self, store: Store) -> None:
        num_withdrawn = self.num_withdrawn
        try:
            publish(Catalog(store), self.dataset, self.scan, parent=Versions(store).newest_number())
        except (CatalogError, IntegrityError):
            assert self.num_withdrawn > num_withdrawn, "refused, though nothing was withdrawn meanwhile"

    def _act(self, work: Callable[[Store], None], steps: int) -> Actor:
        """Somebody begins; when too many are at it, the first of them comes to an end."""
        actor = Actor(work, self.store_type.folder(self.folder / "root"))
        actor.go_on(steps)
        self.actors = [a for a in [*self.actors, actor] if not a.ended]
        if len(self.actors) > MAX_ACTORS:
            self.actors.pop(0).go_on(TO_THE_END)
        return actor

    @precondition(lambda self: self.actors)
    @rule(which=st.integers(0, MAX_ACTORS), steps=STEPS)
    def go_on(self, which: int, steps: int) -> None:
        actor = self.actors[which % len(self.actors)]
        actor.go_on(steps)
        self.actors = [a for a in self.actors if not a.ended]

    @precondition(lambda self: self.actors)
    @rule(which=st.integers(0, MAX_ACTORS))
    def die_in_the_middle(self, which: int) -> None:
        self.actors.pop(which % len(self.actors)).die()

    @invariant()
    def what_counts_is_whole_and_there_once(self) -> None:
        settled = self.catalog.settled()
        assert len({bytes(key) for key in settled.keys}) == len(settled.keys)
        for name in settled.files:
            assert self.catalog.store.exists(name), f"{name} counts, but is gone"

    @invariant()
    def every_version_can_be_read(self) -> None:
        versions = Versions(self.catalog.store)
        for number in versions.numbers():
            rows = versions.rows(versions.get(number)).to_pylist()
            assert [row["index"] for row in rows] == list(range(NUM_ROWS))
            assert all((row["file"] is None) != (row["reason"] is None) for row in rows)
            for name in {row["file"] for row in rows} - {None}:
                assert self.catalog.store.exists(name), f"version {number} names {name}, but it is gone"

    def teardown(self) -> None:
        """From wherever they are, lanes that work undisturbed end with every row."""
        if not hasattr(self, "folder"):
            return
        for actor in self.actors:
            actor.die()
        for _ in range(10):
            self.start_the_run_again()
            if len(self.catalog.settled().final_keys) == NUM_ROWS:
                break
            self._finish()
        self.what_counts_is_whole_and_there_once()
        version = publish(
            self.catalog, self.dataset, self.scan, parent=Versions(self.catalog.store).newest_number()
        )
        assert (version.num_stored, version.complete) == (NUM_ROWS, True)
        shutil.rmtree(self.folder)

    def _finish(self) -> None:
        """A lane takes every shard that has no outcome, once who held some has been silent for long."""
        watcher = self._lane().watcher
        for _ in range(BEATS_TO_STALE):
            watcher.poll()
            self.now_s += 10
        for shard, status in watcher.poll().items():
            if status.state in HAS_ENDED:
                continue
            assert status.state in CLAIMABLE, f"shard {shard} is {status.state}: no lane will ever take it"
            claim = self.catalog.claim(self.plan.plan_id, shard, status.claim + 1, lane="last", details={})
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


class Overwriting(Store):
    """A store on which outcomes aren't created once: the last one stands."""

    def create(self, path: str, data: Buffer) -> None:
        if path.endswith(".outcome"):
            self.put(path, data)
        else:
            super().create(path, data)


class TwoOutcomes(Protocol):
    store_type = Overwriting


LOOKING = settings(
    TestProtocol.settings, max_examples=200, phases=[Phase.generate], database=None, derandomize=True
)


@pytest.mark.timeout(300)
def test_the_model_finds_commits_that_are_not_create_once() -> None:
    with pytest.raises(AssertionError, match="two lanes committed one shard"):
        run_state_machine_as_test(TwoOutcomes, settings=LOOKING)


@pytest.mark.timeout(300)
def test_the_model_finds_shards_that_no_lane_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their failures aren't forgotten when the run is started again."""
    monkeypatch.setattr(Catalog, "retry", lambda self, *place: None)
    with pytest.raises(AssertionError, match="shard . is failed: no lane will ever take it"):
        run_state_machine_as_test(Protocol, settings=LOOKING)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        pytest.param("layertap.garbage._named", lambda store, young: set(), id="gc ignores versions"),
        pytest.param(
            "layertap.versions.Versions._refuse_withdrawn",
            lambda self, places: None,
            id="publish doesn't look at what was withdrawn",
        ),
    ],
)
def test_the_model_finds_versions_whose_files_may_go(
    name: str, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, broken)
    with pytest.raises(AssertionError, match="version . names .*, but it is gone"):
        run_state_machine_as_test(Protocol, settings=LOOKING)
