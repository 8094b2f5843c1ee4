"""Plans, claims and outcomes on real stores; the state of a shard as a table."""

import dataclasses
import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from layertap.catalog import Catalog, PlanRecord, Root, ShardRows
from layertap.errors import (
    AlreadyExistsError,
    CatalogError,
    ClaimLostError,
    DatasetError,
    FormatError,
    InputError,
    IntegrityError,
    NotFoundError,
    SpecMismatchError,
)
from layertap.keys import keys_xor
from layertap.records import DATA, MEMORY, read_record, to_json
from layertap.shard_state import ShardState, shard_state
from layertap.store import Store
from layertap.verify import verify_root
from layertap.versions import Versions
from layertap.watcher import Watcher
from tests.stored import (
    REASONS,
    SPEC,
    claimed,
    dataset_of,
    extract,
    new_catalog,
    plan_for,
    publish,
    some_rows,
    write_attempt,
)

WAITING, CLAIMED, STALE = ShardState.WAITING, ShardState.CLAIMED, ShardState.STALE
FAILED, COMMITTED, VOID = ShardState.FAILED, ShardState.COMMITTED, ShardState.VOID


@pytest.mark.parametrize(
    ("names", "stale", "state", "claim", "num_failures", "num_deaths"),
    [
        ("", [], WAITING, 0, 0, 0),
        ("claim-1", [], CLAIMED, 1, 0, 0),
        ("claim-1", [1], STALE, 1, 0, 1),
        ("claim-1 claim-2", [], CLAIMED, 2, 0, 1),
        ("claim-1 claim-2", [1], CLAIMED, 2, 0, 1),
        ("claim-9 claim-10", [9], CLAIMED, 10, 0, 1),
        # failures
        ("claim-1 fail-1.a", [], WAITING, 1, 1, 0),
        ("claim-1 fail-1.a", [1], WAITING, 1, 1, 0),
        ("claim-1 fail-1.a claim-2", [], CLAIMED, 2, 1, 0),
        ("claim-1 fail-1.a claim-2 fail-2.a", [], WAITING, 2, 2, 0),
        ("claim-1 fail-1.a claim-2 fail-2.b", [], FAILED, 2, 2, 0),
        ("claim-1 fail-1.a claim-2 fail-2.a claim-3 fail-3.a", [], FAILED, 3, 3, 0),
        ("claim-1 fail-1.a claim-2 fail-2.b claim-3", [], CLAIMED, 3, 2, 0),
        # deaths
        ("claim-1 claim-2 claim-3", [], CLAIMED, 3, 0, 2),
        ("claim-1 claim-2 claim-3", [3], FAILED, 3, 0, 3),
        ("claim-1 claim-2 fail-2.a claim-3", [3], FAILED, 3, 1, 2),
        ("claim-1 claim-2 fail-2.a", [], WAITING, 2, 1, 1),
        # given back
        ("claim-1 release-1", [], WAITING, 1, 0, 0),
        ("claim-1 release-1", [1], WAITING, 1, 0, 0),
        ("claim-1 release-1 claim-2 release-2 claim-3 release-3", [], WAITING, 3, 0, 0),
        # retried
        ("claim-1 fail-1.a claim-2 fail-2.b retry-2", [], WAITING, 2, 0, 0),
        ("claim-1 claim-2 claim-3 retry-3", [3], STALE, 3, 0, 0),
        ("claim-1 fail-1.a claim-2 fail-2.b retry-2 claim-3 fail-3.a", [], WAITING, 3, 1, 0),
        ("claim-1 fail-1.a claim-2 fail-2.b retry-2 claim-3 fail-3.a claim-4 fail-4.b", [], FAILED, 4, 2, 0),
        ("claim-1 fail-1.a retry-1 claim-2 fail-2.b retry-2", [], WAITING, 2, 0, 0),
        # settled
        ("claim-1 outcome", [], COMMITTED, 1, 0, 0),
        ("claim-1 outcome", [1], COMMITTED, 1, 0, 1),
        ("claim-1 fail-1.a claim-2 fail-2.b outcome", [], COMMITTED, 2, 2, 0),
        ("claim-1 claim-2 outcome", [], COMMITTED, 2, 0, 1),
        ("claim-1 outcome void-1", [], VOID, 1, 0, 0),
        # lanes' names and kinds of later versions
        ("claim-1 fail-1.gpu-7-of-node.b", [], WAITING, 1, 1, 0),
        ("claim-1 note-1", [], CLAIMED, 1, 0, 0),
    ],
)
def test_the_state_of_a_shard(
    names: str, stale: list[int], state: ShardState, claim: int, num_failures: int, num_deaths: int
) -> None:
    for order in itertools.islice(itertools.permutations(names.split()), 50):
        status = shard_state(order, stale)
        assert (status.state, status.claim, status.num_failures, status.num_deaths) == (
            state,
            claim,
            num_failures,
            num_deaths,
        )


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return new_catalog(store)


@pytest.fixture
def plan(catalog: Catalog, tmp_path: Path) -> PlanRecord:
    return plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog)


@pytest.fixture
def folder_plan(folder_store: Store, tmp_path: Path) -> tuple[Catalog, PlanRecord]:
    catalog = new_catalog(folder_store)
    return catalog, plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog)


def test_a_root_is_made_once_and_joined_by_the_same_extraction(catalog: Catalog) -> None:
    again = catalog.create_root(Root(spec=SPEC, target={"source": "moved"}))
    assert again == catalog.root()
    assert again.spec == SPEC
    assert again.target["source"] == "none"


def test_another_extraction_is_refused_with_the_fields_that_differ(catalog: Catalog) -> None:
    other = dataclasses.replace(SPEC, max_length=51, layer_ids=(0, 2))
    with pytest.raises(
        SpecMismatchError, match=r"layer_ids: \[0, 2, 5\] here, \[0, 2\] asked; max_length: 50 here"
    ):
        catalog.create_root(Root(spec=other, target={}))


def test_a_place_without_a_root_is_named(store: Store) -> None:
    with pytest.raises(CatalogError, match=r"holds no extraction: there is no layertap\.json"):
        Catalog(store).root()


def test_a_newer_major_format_is_refused_and_a_newer_minor_read(store: Store) -> None:
    values = {**Root(spec=SPEC, target={}).to_dict(), "format_version": "1.7", "novelty": 1}
    store.put("layertap.json", to_json(values))
    assert Catalog(store).root().spec == SPEC
    store.put("layertap.json", to_json({**values, "format_version": "2.0"}))
    with pytest.raises(FormatError, match=r"the root has format 2\.0, newer than 1\.0"):
        Catalog(store).root()


def test_a_plan_carries_its_rows(catalog: Catalog, tmp_path: Path) -> None:
    rows = some_rows(40)
    dataset, scan = dataset_of(rows, tmp_path / "rows.parquet")
    record = plan_for(dataset, scan, catalog)
    assert catalog.plans() == [record.plan_id]
    assert catalog.plan(record.plan_id) == record
    assert len(record.shards) > 2
    assert (record.num_rows, record.num_tokens) == (40, int(scan.num_tokens.sum()))

    found: dict[bytes, list[int]] = {}
    for shard, known in enumerate(record.shards):
        part = catalog.shard_rows(record.plan_id, shard)
        assert (len(part.keys), int(part.num_tokens.sum())) == (known.num_rows, known.num_tokens)
        assert known.num_batches == len(set(part.batch.tolist())) == part.batch[-1] + 1
        assert known.keys_xor == keys_xor(part.keys)
        for i, key in enumerate(part.keys):
            found[key.tobytes()] = part.tokens(i).tolist()
    assert found == {scan.keys[i].tobytes(): row["input_ids"][:50] for i, row in enumerate(rows)}


def test_any_arrow_reader_reads_the_rows_of_a_plan(catalog: Catalog, plan: PlanRecord) -> None:
    data = catalog.store.get(f"plans/{plan.plan_id}/shard-00000.arrow")
    table = pa.ipc.open_file(data).read_all()
    assert table.schema.names == ["extraction_key", "input_ids", "batch"]
    assert table.schema.field("extraction_key").type == pa.binary(16)
    rows = catalog.shard_rows(plan.plan_id, 0)
    assert table["input_ids"].to_pylist() == [rows.tokens(i).tolist() for i in range(len(rows.keys))]
    assert table["extraction_key"].to_pylist() == [key.tobytes() for key in rows.keys]


def test_tokens_of_a_shard_cannot_be_changed_by_mistake() -> None:
    rows = ShardRows.of(np.zeros((1, 16), np.uint8), np.zeros(1, np.int32), [np.arange(3, dtype=np.int32)])
    with pytest.raises(ValueError, match="read-only"):
        rows.tokens(0)[0] = 1


def test_an_existing_plan_is_loaded_and_nothing_is_written(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    first = plan_for(dataset, scan, catalog)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("written again")

    monkeypatch.setattr(Store, "put", refuse)
    monkeypatch.setattr(Store, "create", refuse)
    assert plan_for(dataset, scan, catalog) == first


def test_a_plan_without_its_last_object_does_not_exist(catalog: Catalog, plan: PlanRecord) -> None:
    catalog.store.delete([f"plans/{plan.plan_id}/plan.json"])
    assert catalog.plans() == []
    with pytest.raises(NotFoundError):
        catalog.plan(plan.plan_id)


@pytest.mark.parametrize("field", ["spec_fingerprint", "shards", "schema", "settings.shard_tokens"])
def test_a_plan_without_a_field_is_damaged(catalog: Catalog, plan: PlanRecord, field: str) -> None:
    path = f"plans/{plan.plan_id}/plan.json"
    _drop(catalog, path, field)
    name = field.rpartition(".")[2]
    with pytest.raises(IntegrityError, match=rf"{path} is damaged: it lacks the field '{name}'"):
        catalog.plan(plan.plan_id)


@pytest.mark.parametrize("field", ["spec", "spec.dtype", "spec_fingerprint", "target", "format_version"])
def test_a_root_without_a_field_is_damaged(catalog: Catalog, field: str) -> None:
    _drop(catalog, "layertap.json", field)
    name = field.rpartition(".")[2]
    with pytest.raises(IntegrityError, match=rf"layertap\.json is damaged: it lacks the field '{name}'"):
        catalog.root()


def test_an_outcome_without_a_field_is_damaged(catalog: Catalog, plan: PlanRecord) -> None:
    extract(catalog, plan, [0])
    _drop(catalog, f"plans/{plan.plan_id}/state/00000.outcome", "index")
    with pytest.raises(IntegrityError, match=r"00000\.outcome is damaged: it lacks the field 'index'"):
        catalog.settled()


def _drop(catalog: Catalog, path: str, field: str) -> None:
    record = values = json.loads(catalog.store.get(path))
    *parents, name = field.split(".")
    for parent in parents:
        values = values[parent]
    del values[name]
    catalog.store.put(path, to_json(record))


def test_a_root_whose_spec_was_changed_is_refused(catalog: Catalog) -> None:
    values = json.loads(catalog.store.get("layertap.json"))
    values["spec"]["layer_ids"] = [1, 2, 3]
    catalog.store.put("layertap.json", to_json(values))
    changed = dataclasses.replace(SPEC, layer_ids=(1, 2, 3)).fingerprint
    message = rf"layertap\.json is damaged: its spec has the fingerprint {changed}, .* {SPEC.fingerprint}"
    with pytest.raises(IntegrityError, match=message):
        catalog.root()


def test_a_root_whose_spec_makes_no_sense_is_damaged(catalog: Catalog) -> None:
    values = json.loads(catalog.store.get("layertap.json"))
    values["spec"]["dtype"] = "bfloat17"
    catalog.store.put("layertap.json", to_json(values))
    with pytest.raises(IntegrityError, match=r"layertap\.json is damaged: dtype 'bfloat17' is not one of"):
        catalog.root()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_plan_of_another_spec_settles_nothing(catalog: Catalog, plan: PlanRecord, is_damaged: bool) -> None:
    """As where a layertap.json was put over another, or a plan copied in from another root."""
    extract(catalog, plan)
    if is_damaged:  # then its files tell
        catalog.store.put(f"plans/{plan.plan_id}/plan.json", b"")
    other = Root(spec=dataclasses.replace(SPEC, layer_ids=(1, 2, 3)), target={})
    catalog.store.put("layertap.json", to_json(other.to_dict()))
    message = f"plans/{plan.plan_id} is of another extraction .* move that plan's folder out of the root"
    with pytest.raises(CatalogError, match=message):
        catalog.settled()


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, bytes(20), (2).to_bytes(8, "little") + b"{}"])
def test_a_damaged_plan_whose_first_file_is_damaged_too_names_the_shard_to_withdraw(
    catalog: Catalog, plan: PlanRecord, header: bytes
) -> None:
    extract(catalog, plan, [0, 1])
    catalog.store.put(f"plans/{plan.plan_id}/plan.json", b"")
    path = f"plans/{plan.plan_id}/data/00000/attempt-0/batch-00000.safetensors"
    catalog.store.put(path, header + catalog.store.get(path)[len(header) :] if header else b"")
    told = f"{path} .*withdraw them with `layertap void {catalog.store.uri} {plan.plan_id} 0 --withdraw` and"
    with pytest.raises(IntegrityError, match=told):
        catalog.settled()
    catalog.void(plan.plan_id, 0, reason="a test")
    assert len(catalog.settled().keys) == plan.shards[1].num_rows


def test_plans_of_another_schema_stay_settled(catalog: Catalog, plan: PlanRecord) -> None:
    extract(catalog, plan)
    path = f"plans/{plan.plan_id}/plan.json"
    catalog.store.put(path, to_json({**json.loads(catalog.store.get(path)), "schema": 2}))
    assert len(catalog.settled().keys) == plan.num_rows


def test_a_shard_of_more_tokens_than_its_file_can_count_is_refused() -> None:
    rows = [np.broadcast_to(np.int32(7), 2**30)] * 2
    with pytest.raises(
        InputError, match="a shard of 2147483648 tokens is more than the 2147483647 .*smaller"
    ):
        ShardRows.of(np.zeros((2, 16), np.uint8), np.zeros(2, np.int32), rows)


def test_a_plan_of_another_schema_is_refused(catalog: Catalog, plan: PlanRecord) -> None:
    path = f"plans/{plan.plan_id}/plan.json"
    catalog.store.put(path, to_json({**json.loads(catalog.store.get(path)), "schema": 2}))
    with pytest.raises(FormatError, match="has schema 2, this one works on 1"):
        catalog.plan(plan.plan_id)


def test_rows_that_changed_since_the_scan_are_noticed(catalog: Catalog, tmp_path: Path) -> None:
    _, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    changed, _ = dataset_of(some_rows(20, seed=1), tmp_path / "changed.parquet")
    with pytest.raises(DatasetError, match="changed while the plan was made"):
        plan_for(changed, scan, catalog)
    assert catalog.plans() == []


def test_damaged_rows_of_a_plan_are_named_after_one_more_try(
    catalog: Catalog, plan: PlanRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"plans/{plan.plan_id}/shard-00001.arrow"
    whole = catalog.store.get(path)
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 1
    answers = {path: [bytes(flipped), whole]}
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda self, p: answers[p].pop(0) if answers.get(p) else get(self, p))
    assert len(catalog.shard_rows(plan.plan_id, 1).keys) == plan.shards[1].num_rows
    answers[path] = [bytes(flipped), bytes(flipped)]
    with pytest.raises(IntegrityError, match=rf"{path} has the checksum crc64nvme:\w+, but was written with"):
        catalog.shard_rows(plan.plan_id, 1)


def test_a_claim_is_had_once(catalog: Catalog, plan: PlanRecord) -> None:
    assert claimed(catalog, plan, 0, lane="a").number == 1
    assert catalog.claim(plan.plan_id, 0, 1, lane="b", details={}) is None
    assert catalog.read_claim(plan.plan_id, 0, 1)["lane"] == "a"


def test_a_claim_whose_answer_was_lost_is_still_ones_own(
    catalog: Catalog, plan: PlanRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats a put whose answer it never saw, and the store says that there is such an object."""
    create = Store.create

    def answer_lost(self: Store, path: str, data: bytes) -> None:
        create(self, path, data)
        create(self, path, data)

    monkeypatch.setattr(Store, "create", answer_lost)
    assert catalog.claim(plan.plan_id, 0, 1, lane="a", details={}) is not None
    assert catalog.claim(plan.plan_id, 0, 1, lane="a", details={}) is None


def test_a_beat_changes_the_claim_and_shows_progress(catalog: Catalog, plan: PlanRecord) -> None:
    claim = catalog.claim(plan.plan_id, 0, 1, lane="a", details={"host": "h"})
    assert claim is not None
    tags = set()
    for _ in range(3):
        catalog.beat(claim, {"num_tokens": 7})
        tags.add(catalog.snapshot(plan.plan_id).claims[0][1].e_tag)
    assert len(tags) == 3
    seen = catalog.read_claim(plan.plan_id, 0, 1)
    assert (seen["lane"], seen["host"], seen["num_tokens"]) == ("a", "h", 7)


class _Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float, watcher: Watcher) -> ShardState:
        """The state of shard 0 after the seconds, in which the watcher looked every other second."""
        for _ in range(int(seconds // 2)):
            self.now_s += 2
            watcher.poll()
        self.now_s += seconds % 2
        return watcher.poll()[0].state


def test_a_claim_without_three_beats_on_the_watchers_clock_is_stale(
    catalog: Catalog, plan: PlanRecord
) -> None:
    clock = _Clock()
    watcher = Watcher(catalog, plan.plan_id, beat_s=10, clock=clock)
    assert [s.state for s in watcher.poll().values()] == [WAITING] * len(plan.shards)
    claim = claimed(catalog, plan, 0)
    assert watcher.poll()[0].state == CLAIMED
    assert clock.passes(29, watcher) == CLAIMED
    assert clock.passes(1, watcher) == STALE
    catalog.beat(claim, {})
    assert watcher.poll()[0].state == CLAIMED
    assert clock.passes(29, watcher) == CLAIMED
    catalog.beat(claim, {})
    assert clock.passes(29, watcher) == CLAIMED
    assert clock.passes(3, watcher) == STALE


def test_a_watcher_that_comes_late_waits_its_own_three_beats(catalog: Catalog, plan: PlanRecord) -> None:
    clock = _Clock()
    claimed(catalog, plan, 0)
    clock.now_s += 500
    watcher = Watcher(catalog, plan.plan_id, beat_s=10, clock=clock)
    assert watcher.poll()[0].state == CLAIMED
    assert clock.passes(30, watcher) == STALE


def test_a_watcher_that_was_suspended_takes_nobody_for_dead(catalog: Catalog, plan: PlanRecord) -> None:
    """As with all processes of a host, or while the store was away for beats and looks alike."""
    clock = _Clock()
    watcher = Watcher(catalog, plan.plan_id, beat_s=10, clock=clock)
    claim = claimed(catalog, plan, 0)
    watcher.poll()
    clock.now_s += 3600
    assert watcher.poll()[0].state == CLAIMED
    assert clock.passes(8, watcher) == CLAIMED
    catalog.beat(claim, {})
    assert clock.passes(28, watcher) == CLAIMED


def test_the_tenth_claim_comes_after_the_ninth(catalog: Catalog, plan: PlanRecord) -> None:
    for number in (9, 10):
        claimed(catalog, plan, 0, number)
    assert catalog.snapshot(plan.plan_id).claims[0][0] == 10


def test_a_stale_shard_is_taken_over_by_one_lane(catalog: Catalog, plan: PlanRecord) -> None:
    clock = _Clock()
    watcher = Watcher(catalog, plan.plan_id, beat_s=10, clock=clock)
    claimed(catalog, plan, 0, lane="dead")
    watcher.poll()
    assert clock.passes(31, watcher) == STALE
    status = watcher.poll()[0]
    assert (status.state, status.claim, status.num_deaths) == (STALE, 1, 1)
    assert catalog.claim(plan.plan_id, 0, status.claim + 1, lane="b", details={}) is not None
    assert catalog.claim(plan.plan_id, 0, status.claim + 1, lane="c", details={}) is None
    assert watcher.poll()[0].state == CLAIMED


def test_failures_release_and_retry_move_a_shard(catalog: Catalog, plan: PlanRecord) -> None:
    watcher = Watcher(catalog, plan.plan_id)
    first = claimed(catalog, plan, 0, 1, lane="host/gpu.0")
    catalog.fail(first, {"error": "RuntimeError: one"})
    catalog.fail(first, {"error": "repeated"})
    assert (watcher.poll()[0].state, watcher.poll()[0].num_failures) == (WAITING, 1)
    catalog.release(claimed(catalog, plan, 0, 2, lane="b"))
    assert (watcher.poll()[0].state, watcher.poll()[0].num_failures) == (WAITING, 1)
    catalog.fail(claimed(catalog, plan, 0, 3, lane="c"), {"error": "RuntimeError: three"})
    assert watcher.poll()[0].state == FAILED
    assert catalog.last_failure(plan.plan_id, 0, watcher.poll()[0])["error"] == "RuntimeError: three"
    catalog.retry(plan.plan_id, 0, 3)
    catalog.retry(plan.plan_id, 0, 3)
    assert (watcher.poll()[0].state, watcher.poll()[0].num_failures) == (WAITING, 0)
    assert all(watcher.poll()[k].state == WAITING for k in range(1, len(plan.shards)))


def test_lanes_that_died_in_silence_are_the_failure(catalog: Catalog, plan: PlanRecord) -> None:
    for number in (1, 2):
        catalog.fail(claimed(catalog, plan, 1, number, lane=f"lane-{number}"), {"error": "RuntimeError: old"})
    catalog.retry(plan.plan_id, 1, 2)
    for number in (3, 4, 5, 6):
        last = claimed(catalog, plan, 1, number, lane=f"lane-{number}")
    catalog.release(last)
    status = shard_state(catalog.snapshot(plan.plan_id).names[1])
    assert (status.state, status.num_failures, status.num_deaths) == (FAILED, 0, 3)
    told = catalog.last_failure(plan.plan_id, 1, status)
    assert told["error"] == "3 lanes died while they held shard 1, none left an error"
    assert (told["lane"], told["claim"]) == ("lane-5", 5), "neither who failed before nor who gave it back"


STRAY = [
    ".DS_Store",
    "._00000.outcome",
    "00000.outcome.tmp",
    "00000.claim-1~",
    "00000.outcome (1)",
    "Thumbs.db",
    "old/00000.outcome",
]


@pytest.mark.parametrize("stray", STRAY)
def test_stray_files_in_the_state_folder_are_ignored(catalog: Catalog, plan: PlanRecord, stray: str) -> None:
    catalog.store.put(f"plans/{plan.plan_id}/state/{stray}", b"?")
    claim = claimed(catalog, plan, 0)
    catalog.fail(claim, {"error": "no"})
    assert catalog.snapshot(plan.plan_id).names == {0: ["claim-1", f"fail-1.{claim.lane}"]}


def test_stop_is_seen_by_the_lanes_of_its_run_alone(catalog: Catalog, plan: PlanRecord) -> None:
    catalog.stop(plan.plan_id, "run-1")
    assert catalog.stopping(plan.plan_id, "run-1")
    assert not catalog.stopping(plan.plan_id, "run-2")
    assert catalog.snapshot(plan.plan_id).names == {}


def test_of_two_owners_of_a_shard_one_commits(catalog: Catalog, plan: PlanRecord) -> None:
    owners = [claimed(catalog, plan, 0, n, lane=f"lane-{n}") for n in (1, 2)]
    outcomes = [write_attempt(catalog, claim, attempt=f"attempt-{claim.number}") for claim in owners]
    barrier, results = threading.Barrier(2), {}

    def commit(k: int) -> None:
        barrier.wait()
        try:
            results[k] = catalog.commit(owners[k], outcomes[k])
        except ClaimLostError as error:
            results[k] = error

    threads = [threading.Thread(target=commit, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    lost = [k for k in (0, 1) if isinstance(results[k], ClaimLostError)]
    assert len(lost) == 1
    winner = 1 - lost[0]
    assert results[winner] == catalog.outcome(plan.plan_id, 0) == outcomes[winner]
    assert f"outcome of lane lane-{winner + 1} (claim {winner + 1})" in str(results[lost[0]])
    assert set(catalog.settled().files) <= {
        f"plans/{plan.plan_id}/data/00000/attempt-{winner + 1}/{file['name']}"
        for file in outcomes[winner].files
    }


def test_a_retried_own_commit_succeeds(catalog: Catalog, plan: PlanRecord) -> None:
    claim = claimed(catalog, plan, 0)
    outcome = write_attempt(catalog, claim)
    assert catalog.commit(claim, outcome) == outcome
    assert catalog.commit(claim, outcome) == outcome
    other_try = dataclasses.replace(outcome, attempt="attempt-1")
    with pytest.raises(ClaimLostError):
        catalog.commit(claim, other_try)


def test_nothing_counts_before_its_outcome(folder_plan: tuple[Catalog, PlanRecord]) -> None:
    catalog, plan = folder_plan
    claim = claimed(catalog, plan, 0)
    outcome = write_attempt(catalog, claim)
    assert len(catalog.settled().keys) == 0
    assert catalog.without_outcome(plan.plan_id) == list(range(len(plan.shards)))
    catalog.commit(claim, outcome)
    assert len(catalog.settled().keys) == plan.shards[0].num_rows
    assert catalog.without_outcome(plan.plan_id) == list(range(1, len(plan.shards)))


def test_settled_rows_are_found_where_they_lie(catalog: Catalog, plan: PlanRecord) -> None:
    keys = catalog.shard_rows(plan.plan_id, 1).keys
    extract(catalog, plan, [0, 1], refused=[keys[0].tobytes()])
    settled = catalog.settled()
    assert len(settled.keys) == plan.shards[0].num_rows + plan.shards[1].num_rows
    at = settled.find(keys)
    assert (settled.keys[at] == keys).all()
    assert settled.file[at[0]] == -1
    assert settled.reasons == {int(at[0]): "a state is not finite"}
    for i in at[1:]:
        path = settled.files[settled.file[i]]
        assert path.startswith(f"plans/{plan.plan_id}/data/00001/attempt-0/batch-")
        data = catalog.store.get_range(path, int(settled.offset[i]), int(settled.nbytes[i]))
        tokens = np.frombuffer(data, np.int32)[-settled.num_tokens[i] :]
        k = next(k for k in range(len(keys)) if keys[k].tobytes() == settled.keys[i].tobytes())
        assert tokens.tolist() == catalog.shard_rows(plan.plan_id, 1).tokens(k).tolist()
    assert settled.find(np.full((2, 16), 255, np.uint8)).tolist() == [-1, -1]


def test_keys_that_end_in_zeros_are_told_apart(folder_plan: tuple[Catalog, PlanRecord]) -> None:
    catalog, plan = folder_plan
    extract(catalog, plan)
    settled = catalog.settled()
    keys = np.zeros((3, 16), np.uint8)
    keys[1, 0], keys[2, :2] = 7, (7, 1)
    some = dataclasses.replace(settled, keys=keys)
    assert some.find(keys[::-1]).tolist() == [2, 1, 0]


def test_settled_rows_are_not_planned_again_and_the_rest_is(
    folder_plan: tuple[Catalog, PlanRecord], tmp_path: Path
) -> None:
    catalog, plan = folder_plan
    refused = catalog.shard_rows(plan.plan_id, 0).keys[0].tobytes()
    extract(catalog, plan, refused=[refused])
    dataset, scan = dataset_of(some_rows(25), tmp_path / "grown.parquet")
    again = plan_for(dataset, scan, catalog)
    assert again.num_rows == 5
    assert sorted(catalog.plans()) == sorted([plan.plan_id, again.plan_id])


def test_a_row_stored_by_two_plans_is_settled_once(
    folder_plan: tuple[Catalog, PlanRecord], tmp_path: Path
) -> None:
    """Two runs at once may cut the same rows differently; refused by one but stored by the other counts."""
    catalog, plan = folder_plan
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    other = plan_for(dataset, scan, catalog, shard_tokens=10_000)
    refused = catalog.shard_rows(plan.plan_id, 0).keys[0].tobytes()
    extract(catalog, plan, refused=[refused])
    extract(catalog, other)
    settled = catalog.settled()
    assert len(settled.keys) == 20
    assert settled.reasons == {}
    assert (settled.file >= 0).all()


def test_a_row_without_memory_is_named_and_planned_again_and_a_bad_one_is_not(
    folder_plan: tuple[Catalog, PlanRecord], tmp_path: Path
) -> None:
    catalog, plan = folder_plan
    bad, large = (catalog.shard_rows(plan.plan_id, k).keys[0].tobytes() for k in (0, 1))
    extract(catalog, plan, [0], refused=[bad])
    extract(catalog, plan, range(1, len(plan.shards)), refused=[large], fault=MEMORY)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    version = publish(catalog, dataset, scan)
    assert sorted(Versions(catalog.store).missing(version).values()) == sorted(REASONS.values())
    assert (version.complete, version.num_without_memory) == (True, 1)
    again = plan_for(dataset, scan, catalog)
    assert again.num_rows == 1
    assert catalog.shard_rows(again.plan_id, 0).keys[0].tobytes() == large
    extract(catalog, again, refused=[large])  # now it is found to be bad: for good
    assert set(catalog.settled().reasons.values()) == {REASONS[DATA]}
    assert len(catalog.settled().final_keys) == 20
    assert publish(catalog, dataset, scan, parent=1).num_without_memory == 0


def test_a_withdrawn_shard_settles_nothing(folder_plan: tuple[Catalog, PlanRecord]) -> None:
    catalog, plan = folder_plan
    extract(catalog, plan, [1])
    catalog.store.create(f"plans/{plan.plan_id}/state/00001.void-1", b"{}")
    assert len(catalog.settled().keys) == 0


def test_no_poll_reads_a_data_prefix(
    folder_plan: tuple[Catalog, PlanRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, plan = folder_plan
    extract(catalog, plan)
    listed: list[str] = []
    list_ = Store.list
    monkeypatch.setattr(Store, "list", lambda self, prefix: listed.append(prefix) or list_(self, prefix))
    Watcher(catalog, plan.plan_id).poll()
    catalog.settled()
    catalog.without_outcome(plan.plan_id)
    assert set(listed) == {f"plans/{plan.plan_id}/state"}


def test_a_create_of_another_kind_is_not_swallowed(catalog: Catalog, plan: PlanRecord) -> None:
    catalog.store.create(f"plans/{plan.plan_id}/state/00000.outcome", b"not json")
    claim = claimed(catalog, plan, 0)
    with pytest.raises(IntegrityError, match=r"00000\.outcome is damaged"):
        catalog.commit(claim, write_attempt(catalog, claim))
    with pytest.raises(AlreadyExistsError):
        catalog.store.create(f"plans/{plan.plan_id}/state/00000.outcome", b"{}")


def test_a_flipped_bit_in_a_record_is_found_or_changes_no_field() -> None:
    values = {
        "plan_id": "3f",
        "max_batch_bytes": 509_668,
        "shards": ({"num_rows": 7},),
        "by": {10: 0.1, 9: None},
    }
    data, found = to_json(values), 0
    assert read_record("plan.json", data, dict) == json.loads(json.dumps(values))
    for k in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[k // 8] ^= 1 << k % 8
        try:
            read = read_record("plan.json", bytes(damaged), dict)
        except IntegrityError:
            found += 1
        else:
            assert {name: read[name] for name in values} == json.loads(json.dumps(values))
    assert found > 6 * len(data)


@pytest.mark.parametrize(("record", "field"), [("plan.json", "max_batch_bytes"), ("00000.outcome", "claim")])
def test_a_record_with_another_digit_is_a_finding_with_a_way_out(
    catalog: Catalog, tmp_path: Path, record: str, field: str
) -> None:
    plan = plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog)
    extract(catalog, plan)
    path = f"plans/{plan.plan_id}/{record if record == 'plan.json' else f'state/{record}'}"
    text = bytes(catalog.store.get(path)).decode()
    catalog.store.put(path, re.sub(f'("{field}": )[0-9]', r"\g<1>8", text).encode())
    found = [finding for finding in verify_root(catalog.store).findings if finding.where == path]
    assert found and "its fields have the checksum" in found[0].problem and found[0].way_out


def test_shards_of_which_only_states_are_left_can_be_withdrawn(catalog: Catalog, tmp_path: Path) -> None:
    plan = plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog)
    extract(catalog, plan)
    store, names = catalog.store, catalog.store.names(f"plans/{plan.plan_id}")
    store.delete([f"plans/{plan.plan_id}/{name}" for name in names if name.endswith((".json", ".arrow"))])
    assert catalog.shards(plan.plan_id) == [*range(len(plan.shards))]
