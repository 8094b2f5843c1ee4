"""A root is read back: the sound one is found sound, each damage is named with a way out that works."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from layertap import HiddenStates
from layertap.catalog import Catalog
from layertap.cli import main
from layertap.coordinator import Run
from layertap.errors import IntegrityError, StoreRefusedError
from layertap.object_server import ObjectServer
from layertap.records import from_json, to_json
from layertap.store import Buffer, Store, checksum
from layertap.target import Target
from layertap.verify import verify_root
from layertap.versions import Versions
from tests.models import saved, tiny_llama
from tests.proxy import Faults, Proxy
from tests.runs import assert_read_back, run_lane, save_rows, settings_for
from tests.runs import some_rows as distinct_rows
from tests.stored import dataset_of, extract, new_catalog, plan_for, printed_void, publish, some_rows


@pytest.fixture
def catalog(store: Store, tmp_path: Path) -> Catalog:
    return extracted(store, tmp_path)


def extracted(store: Store, tmp_path: Path) -> Catalog:
    """A root with one plan of several shards, all committed, a row refused, and a version."""
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    extract(catalog, plan, refused={catalog.shard_rows(plan.plan_id, 0).keys[0].tobytes()})
    publish(catalog, dataset, scan)
    return catalog


def files_of(catalog: Catalog, suffix: str) -> list[str]:
    return [
        info.path
        for info in catalog.store.list("plans") + catalog.store.list("versions")
        if info.path.endswith(suffix)
    ]


@pytest.mark.parametrize("num_rows", [None, 1000, 5])
def test_what_was_written_is_sound(catalog: Catalog, num_rows: int | None) -> None:
    report = verify_root(catalog.store, num_rows=num_rows)
    report.check()
    assert report.num_rows == (5 if num_rows == 5 else 19)


def flip(data: bytearray) -> None:
    data[-1000] ^= 1


def cut(data: bytearray) -> None:
    del data[-1000:]


def rot_header(data: bytearray) -> None:
    data[9] ^= 0x80


def other_header(data: bytearray) -> None:
    at = data.index(b"BF16")
    data[at : at + 4] = b"F16 "


@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize(
    ("suffix", "damage", "problem"),
    [
        ("batch-00000.safetensors", flip, "CRC64NVME"),
        ("batch-00000.safetensors", cut, "bytes"),
        ("batch-00000.safetensors", rot_header, "the header"),
        ("batch-00000.safetensors", None, "safetensors"),
        ("index.parquet", flip, "checksum"),
        ("index.parquet", None, "index.parquet"),
        ("00001.outcome", cut, "damaged"),
    ],
)
def test_damage_is_named_and_mended_by_the_way_out(
    store: Store,
    tmp_path: Path,
    suffix: str,
    damage: Callable[[bytearray], None] | None,
    problem: str,
    all_rows: bool,
) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    extract(catalog, plan)
    path = files_of(catalog, suffix)[-1]
    shard = int(path.split("/data/")[1][:5]) if "/data/" in path else 1
    data = bytearray(store.get(path))
    if damage is None:
        store.delete([path])
    else:
        damage(data)
        store.put(path, data)

    report = verify_root(store, num_rows=None if all_rows else 1000)
    assert report.findings
    assert all(f"/{shard:05d}" in finding.where for finding in report.findings)
    assert any(problem in str(finding) for finding in report.findings)
    (way_out,) = report.ways_out()
    assert printed_void(way_out) == ["void", store.uri, plan.plan_id, str(shard), "--withdraw"]
    with pytest.raises(IntegrityError, match="layertap void"):
        report.check()

    assert CliRunner().invoke(main, printed_void(way_out)).exit_code == 0
    again = plan_for(dataset, scan, catalog)
    assert again.num_rows == plan.shards[shard].num_rows
    extract(catalog, again)
    verify_root(store, num_rows=None).check()
    assert publish(catalog, dataset, scan).num_stored == 20
    assert len(list(HiddenStates(store))) == 20


@pytest.mark.parametrize("num_rows", [None, 1000])
def test_a_header_that_says_something_else_is_named(catalog: Catalog, num_rows: int | None) -> None:
    """As by a writer at fault, whose checksums agree with what it wrote."""
    path = files_of(catalog, "batch-00000.safetensors")[0]
    data = bytearray(catalog.store.get(path))
    other_header(data)
    catalog.store.put(path, data)
    _rewrite_checksum(catalog, path, data)
    (finding,) = verify_root(catalog.store, num_rows=num_rows).findings
    assert finding.where == path
    assert "the header says of" in finding.problem


def _rewrite_checksum(catalog: Catalog, path: str, data: bytes | bytearray) -> None:
    plan, _, shard, _, name = path.removeprefix("plans/").split("/")
    outcome = f"plans/{plan}/state/{shard}.outcome"
    values = from_json(outcome, catalog.store.get(outcome))
    for file in values["files"]:
        if file["name"] == name:
            file.update(size=len(data), checksum=checksum(data))
    catalog.store.put(outcome, to_json(values))


@pytest.mark.parametrize(("value", "problem"), [(0.0, "is 0 everywhere"), (float("nan"), "isn't finite")])
def test_states_that_make_no_sense_are_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, problem: str
) -> None:
    """As from a lane whose device computed nothing: every checksum agrees."""
    import tests.stored

    def nonsense(tokens: list[int], *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        filled = torch.full((len(tokens), 4, tests.stored.HIDDEN_SIZE), value, dtype=torch.bfloat16)
        return filled[:, 1:], filled[:, 0]

    monkeypatch.setattr(tests.stored, "states_of", nonsense)
    catalog = new_catalog(store)
    plan = plan_for(*dataset_of(some_rows(5), tmp_path / "rows.parquet"), catalog)
    extract(catalog, plan)
    findings = verify_root(store, num_rows=2).findings
    assert len(findings) == 2
    assert all(problem in finding.problem for finding in findings)


def test_lost_rows_of_a_shard_are_named(catalog: Catalog) -> None:
    path = files_of(catalog, "00000.outcome")[0]
    values = from_json(path, catalog.store.get(path))
    values["refused"] = []
    catalog.store.put(path, to_json(values))
    (finding,) = verify_root(catalog.store).findings
    assert "rows stored and 0 refused aren't the" in finding.problem


def test_a_damaged_plan_is_named_and_counts_until_it_is_withdrawn(store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    extract(catalog, plan)
    store.put(f"plans/{plan.plan_id}/plan.json", b"{")
    (finding,) = verify_root(store).findings
    assert finding.where == f"plans/{plan.plan_id}/plan.json"
    assert len(catalog.settled().keys) == 20

    done = CliRunner().invoke(main, ["void", "nowhere", plan.plan_id, "--all"])
    assert done.exit_code == 1
    for shard in catalog.shards(plan.plan_id):
        catalog.void(plan.plan_id, shard, reason="a test")
    assert len(catalog.settled().keys) == 0


def test_a_damaged_version_is_named_and_published_anew(catalog: Catalog, tmp_path: Path) -> None:
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    (table,) = files_of(catalog, ".parquet")[-1:]
    catalog.store.put(table, b"damaged")
    (finding,) = verify_root(catalog.store).findings
    assert finding.where == "versions/1.json"
    assert "publishes a new version" in finding.way_out
    assert publish(catalog, dataset, scan, parent=1).number == 2
    versions = Versions(catalog.store)
    assert versions.rows(versions.get(2)).num_rows == 20


def test_a_complete_version_that_lost_files_is_named_though_a_newer_one_is_there(
    catalog: Catalog, tmp_path: Path
) -> None:
    """Readers get the complete one."""
    (plan_id,) = catalog.plans()
    catalog.void(plan_id, 0, reason="a test")
    assert not publish(catalog, *dataset_of(some_rows(22), tmp_path / "grown.parquet"), parent=1).complete
    (finding,) = verify_root(catalog.store).findings
    assert finding.where == "versions/1.json"
    assert "files that no outcome names" in finding.problem


def test_a_version_published_while_it_is_read_is_no_finding(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(20), tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    extract(catalog, plan, [0])
    publish(catalog, dataset, scan)
    committed = Catalog.committed

    def meanwhile(self: Catalog, plan_id: str) -> list[int]:
        found = committed(self, plan_id)
        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "committed", committed)
            extract(catalog, plan, range(1, len(plan.shards)))
            publish(catalog, dataset, scan, parent=1)
        return found

    monkeypatch.setattr(Catalog, "committed", meanwhile)
    verify_root(store).check()
    assert Versions(store).numbers() == [1, 2]


@pytest.mark.parametrize("num_rows", [None, 1000])
def test_bytes_damaged_on_their_way_once_are_no_finding(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, num_rows: int | None
) -> None:
    read: set[tuple[object, ...]] = set()

    def once_damaged(method: Callable[..., Buffer]) -> Callable[..., Buffer]:
        def reads(self: Store, path: str, *at: int) -> Buffer:
            data = bytearray(method(self, path, *at))
            if path.endswith(".safetensors") and (path, *at) not in read:
                read.add((path, *at))
                flip(data) if len(data) > 1000 else cut(data)
            return bytes(data)

        return reads

    monkeypatch.setattr(Store, "get", once_damaged(Store.get))
    monkeypatch.setattr(Store, "get_range", once_damaged(Store.get_range))
    verify_root(catalog.store, num_rows=num_rows).check()
    assert read


@pytest.mark.parametrize("num_rows", [None, 1000])
def test_a_store_that_refuses_says_nothing_of_what_it_holds(
    s3_store: Store, object_server: ObjectServer, tmp_path: Path, num_rows: int | None
) -> None:
    extracted(s3_store, tmp_path)
    with Proxy(object_server.ports.s3, Faults(forbidden=re.compile("GET .*batch-"))).running() as proxy:
        bucket, _, prefix = s3_store.uri.removeprefix("s3://").partition("/")
        settings = object_server.settings(bucket, prefix)
        refusing = Store.s3(replace(settings, endpoint_url=proxy.endpoint_url), object_server.session())
        with pytest.raises(StoreRefusedError, match="batch-.*AccessDenied"):
            verify_root(refusing, num_rows=num_rows)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_llama(), tmp_path_factory.mktemp("target"))


def test_withdrawn_rows_are_computed_again_by_the_same_run_as_often_as_need_be(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    rows = distinct_rows(12)
    settings = settings_for(save_rows(rows, tmp_path / "rows"), target)
    plans = []
    for _ in range(3):
        run = Run.prepare(folder_store, settings)
        assert run.plan is not None
        assert run.plan.num_rows == 12
        plans.append(run.plan.plan_id)
        run_lane(folder_store, run.plan.plan_id, target)
        assert run.publish().version.complete
        arguments = ["void", folder_store.uri, run.plan.plan_id, "--all", "--withdraw"]
        assert CliRunner().invoke(main, arguments).exit_code == 0
    assert len(set(plans)) == 3
    assert_read_back(folder_store, rows, tiny_llama())


def test_rows_recomputed_on_the_target_agree_and_altered_ones_do_not(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    settings = settings_for(save_rows(distinct_rows(12), tmp_path / "rows"), target)
    run = Run.prepare(folder_store, settings)
    assert run.plan is not None
    run_lane(folder_store, run.plan.plan_id, target)

    report = verify_root(folder_store, target=target, num_recomputed=4)
    report.check()
    assert "4 rows recomputed, 4 by the same path: median relative error" in report.recomputed

    # an outcome of another device: the logits decide
    for path in files_of(Catalog(folder_store), ".outcome"):
        values = json.loads(folder_store.get(path))
        values["environment"]["device"]["name"] = "another"
        folder_store.put(path, to_json(values))
    report = verify_root(folder_store, target=target, num_recomputed=4)
    report.check()
    assert "4 by another path: mean KL of the logits" in report.recomputed

    # files that were cut: named, and not a reason to say nothing else
    for path in files_of(Catalog(folder_store), ".safetensors"):
        folder_store.put(path, folder_store.get(path)[:200])
    report = verify_root(folder_store, target=target, num_recomputed=4)
    assert {finding.where for finding in report.findings} == set(
        files_of(Catalog(folder_store), ".safetensors")
    )
    assert report.recomputed == "0 rows recomputed"


@pytest.mark.timeout(600)  # compiling takes long
@pytest.mark.usefixtures("modeling_as_it_was")
def test_rows_are_recomputed_by_the_path_of_their_lane_eager_or_compiled(
    folder_store: Store, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, rows = Target.load, distinct_rows(20)

    def load_compiled(*arguments: Any, **options: Any) -> Target:
        loaded = load(*arguments, **options)
        if loaded.device.type == "cpu":  # where a lane compiles nothing by itself
            loaded.compile(max_batch_tokens=256)
        return loaded

    for lane, rows_by_then in (("eager", rows[:8]), ("compiled", rows)):
        run = Run.prepare(folder_store, settings_for(save_rows(rows_by_then, tmp_path / lane), target))
        assert run.plan is not None
        run_lane(folder_store, run.plan.plan_id, target, lane, compiled=lane == "compiled")
        monkeypatch.setattr(Target, "load", load_compiled)
    report = verify_root(folder_store, target=target, num_recomputed=20)
    report.check()
    assert "20 rows recomputed, 20 by the same path: median relative error" in report.recomputed


def test_states_of_another_computation_are_named(folder_store: Store, tmp_path: Path, target: str) -> None:
    """Sound by every checksum, but not what the target computes."""
    settings = settings_for(save_rows(distinct_rows(12), tmp_path / "rows"), target)
    run = Run.prepare(folder_store, settings)
    assert run.plan is not None
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    other = saved(model, tmp_path / "other")
    original = Target.load
    wrong_spec = Run.prepare(Store.folder(tmp_path / "x"), settings_for(settings.dataset, other)).preview.spec
    with pytest.MonkeyPatch.context() as patch:
        load = lambda _source, *, spec, **rest: _pretend(original(other, spec=wrong_spec, **rest), spec)  # noqa: E731
        patch.setattr(Target, "load", load)
        run_lane(folder_store, run.plan.plan_id, target)
    report = verify_root(folder_store, target=target, num_recomputed=4)
    assert len(report.findings) >= 4
    assert "differs from the recomputed one by" in report.findings[0].problem


def _pretend(target: object, spec: object) -> object:
    target.spec = spec  # type: ignore[attr-defined]
    return target


def test_the_command_says_what_it_read_and_fails_on_findings(catalog: Catalog, aws_environment: None) -> None:
    uri = catalog.store.uri
    done = CliRunner().invoke(main, ["verify", uri, "--all"])
    assert done.exit_code == 0
    assert "19 rows in" in done.output
    path = files_of(catalog, "batch-00000.safetensors")[0]
    catalog.store.put(path, catalog.store.get(path)[:-1])
    done = CliRunner().invoke(main, ["verify", uri])
    assert done.exit_code == 1
    assert path in done.output
    assert "layertap void" in done.output


def test_void_refuses_what_is_not_there(catalog: Catalog, aws_environment: None) -> None:
    uri, (plan,) = catalog.store.uri, catalog.plans()
    last = catalog.shards(plan)[-1]
    for arguments, message in [
        (["none", "0"], "has no plan 'none'; plans there: "),
        ([plan, "77"], f"has no shard 77; its shards are 0 to {last}"),
        ([plan], "give either the shards to withdraw, or --all"),
    ]:
        done = CliRunner().invoke(main, ["void", uri, *arguments])
        assert done.exit_code == 2
        assert message in done.output


def test_void_says_what_is_stored_and_withdraws_when_told(folder_store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(folder_store)
    plan = plan_for(*dataset_of(some_rows(20), tmp_path / "rows.parquet"), catalog)
    extract(catalog, plan, [0, 1, 2])
    folder_store.put(f"plans/{plan.plan_id}/state/00001.outcome", b"{")
    num_rows = plan.shards[0].num_rows + plan.shards[2].num_rows
    command = ["void", folder_store.uri, plan.plan_id, "--all"]
    told = (
        f"{len(plan.shards)} shards of plan {plan.plan_id}: 3 are committed, with {num_rows} rows stored, "
        "and 1 whose records are damaged"
    )
    shown = CliRunner().invoke(main, command)
    assert (shown.exit_code, shown.output.splitlines()) == (
        0,
        [told, "Nothing was withdrawn: add --withdraw to do it."],
    )
    assert catalog.committed(plan.plan_id) == [0, 1, 2]
    done = CliRunner().invoke(main, [*command, "--withdraw"])
    assert done.exit_code == 0 and done.output.startswith(told)
    assert catalog.committed(plan.plan_id) == []
    again = CliRunner().invoke(main, [*command, "--withdraw"])
    assert again.output.startswith(f"{len(plan.shards)} shards of plan {plan.plan_id} are withdrawn already")
    assert again.output.endswith("Nothing was withdrawn.\n")
