"""Extraction through a real Prefect server, worker pools, lanes and an S3 server, with deaths on the way."""

import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from layertap.object_server import ObjectServer
from tests.models import tiny_llama
from tests.runs import assert_read_back, save_rows, some_rows
from tests.system.postgres import PASSWORD
from tests.system.stacks import LANES, RealStack, layertap, start, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

LOCKED_S = 45.0
"""Seconds; Prefect's server waits for a lock for a minute, answers 503, and is asked again."""

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def run_under_way(stack: RealStack, dataset: str, target: str, root: str) -> "subprocess.Popen[str]":
    """A run of many shards, of which some are done."""
    run = start(stack.run_options(dataset, target, root, shard_tokens=150))

    def some_shards_are_done() -> bool:
        assert run.poll() is None, run.communicate()[0]
        return len(stack.outcomes(root)) >= 5

    wait_for(some_shards_are_done)
    return run


def assert_succeeds(run: "subprocess.Popen[str]") -> None:
    output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output


def final_states(stack: RealStack, root: str) -> dict[str, str]:
    """How the lanes on this root ended; one that was taken back while it started needs a moment."""

    def ends() -> dict[str, str] | None:
        states = {lane["id"]: lane["state_type"] for lane in stack.runs_of("extraction_lane", root)}
        return states if set(states.values()) <= FINAL else None

    found: dict[str, str] = wait_for(ends)
    return found


def on_s3(stack: RealStack, dataset: Path) -> str:
    """The address of a copy of the dataset in the stack's bucket."""
    store = stack.store("datasets")
    for file in dataset.iterdir():
        store.put(f"{dataset.name}/{file.name}", file.read_bytes())
    return f"{store.uri}/{dataset.name}"


def test_a_run_extracts_every_row_and_a_second_one_computes_nothing(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(320)
    unfit = {"input_ids": [1, 100_000], "loss_mask": [1, 1], "id": "unfit"}
    dataset = on_s3(stack, Path(save_rows([*rows, unfit], tmp_path / "rows")))
    options = stack.run_options(dataset, target, "plain")

    assert "320 of 321 rows are stored, 1 are missing: version 1" in layertap(*options)
    assert_read_back(stack.store("plain"), rows, tiny_llama())

    lanes = stack.runs_of("extraction_lane", "plain")
    assert [lane["state_type"] for lane in lanes] == ["COMPLETED"] * LANES
    shards = stack.ask("task_runs", flow_runs={"id": {"any_": [lane["id"] for lane in lanes]}})
    outcomes = stack.outcomes("plain")
    assert sorted(shard["name"] for shard in shards) == [f"shard-{k:05d}" for k in range(len(outcomes))]
    assert {shard["state_type"] for shard in shards} == {"COMPLETED"}
    (coordinator,) = stack.runs_of("extract_hidden_states", "plain")
    artifacts = stack.ask("artifacts", flow_runs={"id": {"any_": [coordinator["id"]]}})
    assert sorted(a["key"] for a in artifacts) == [
        f"layertap-{name}" for name in ("outcome", "plan", "progress", "refused", "root", "shards", "speed")
    ]
    assert {a["data"] for a in artifacts if a["type"] == "progress"} == {100.0}

    assert "320 of 321 rows are stored, 1 are missing: version 1" in layertap(*options)
    assert len(stack.runs_of("extraction_lane", "plain")) == LANES
    assert stack.outcomes("plain") == outcomes


def test_the_secret_key_of_the_store_shows_nowhere(stack: RealStack, target: str, tmp_path: Path) -> None:
    server = ObjectServer.running(stack.stack.objects)
    assert server is not None
    secret = server.environment()["AWS_SECRET_ACCESS_KEY"]
    run = run_under_way(stack, save_rows(some_rows(300, seed=6), tmp_path / "rows"), target, "secret")
    processes = [str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])]
    assert_succeeds(run)
    store = stack.store("")
    told = {
        "processes": processes,
        "records": [bytes(store.get(o.path)).decode(errors="replace") for o in store.list("secret")],
        "log files": [file.read_text(errors="replace") for file in stack.stack.state.rglob("*.log")],
    }
    for what in ("flow_runs", "task_runs", "artifacts", "deployments", "work_pools", "block_documents"):
        told[what] = [str(one) for one in stack.ask(what)]
    told["logs"] = [str(one) for one in stack.logs()]
    assert all(told.values()), {what: len(found) for what, found in told.items()}
    assert {what for what, found in told.items() for text in found if secret in text} == set()


def test_a_lane_killed_half_way_costs_no_row_and_doubles_none(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(1003, seed=1)
    run = run_under_way(stack, save_rows(rows, tmp_path / "rows"), target, "killed")
    first, *_ = [r for r in stack.runs_of("extraction_lane", "killed") if r["state_type"] == "RUNNING"]
    stack.engine(first["id"]).kill()

    assert_succeeds(run)
    assert_read_back(stack.store("killed"), rows, tiny_llama())
    ends = final_states(stack, "killed")
    assert ends.pop(first["id"]) == "CRASHED"
    assert "COMPLETED" in ends.values()
    assert set(ends.values()) <= {"COMPLETED", "CANCELLED"}


def test_stopped_workers_leave_no_run_running_and_the_run_goes_on_with_new_ones(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(800, seed=2)
    run = run_under_way(stack, save_rows(rows, tmp_path / "rows"), target, "stopped")
    engines = [
        stack.engine(lane["id"])
        for lane in stack.runs_of("extraction_lane", "stopped")
        if lane["state_type"] == "RUNNING"
    ]
    assert engines
    assert stack.stack.daemon("lanes").end(90)

    _, alive = psutil.wait_procs(engines, timeout=1)
    assert not alive
    assert all(lane["state_type"] != "RUNNING" for lane in stack.runs_of("extraction_lane", "stopped"))

    stack.up()
    assert_succeeds(run)
    assert_read_back(stack.store("stopped"), rows, tiny_llama())
    assert "COMPLETED" in final_states(stack, "stopped").values()


def test_a_strict_run_fails_with_the_reason(stack: RealStack, target: str, tmp_path: Path) -> None:
    rows = [*some_rows(200), {"input_ids": [1, 100_000], "loss_mask": [1, 1], "id": "unfit"}]
    options = stack.run_options(save_rows(rows, tmp_path / "rows"), target, "strict")
    run = start([*options, "--strict"])
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 1
    assert "1 of 201 rows are refused" in output
    assert "row 200" in output
    assert "100000" in output
    assert not stack.runs_of("extraction_lane", "strict")


@contextmanager
def locked(database: Path) -> Iterator[None]:
    """Somebody else, a backup perhaps, writes to Prefect's SQLite for a long while."""
    with closing(sqlite3.connect(database, timeout=120, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


@pytest.mark.long
@pytest.mark.parametrize("stack", ["sqlite"], indirect=True)
def test_a_database_that_is_locked_in_mid_run_stops_nothing(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(1003, seed=10)
    run = run_under_way(stack, save_rows(rows, tmp_path / "rows"), target, "locked")
    with locked(stack.stack.state / "prefect" / "prefect.db"):
        before = len(stack.outcomes("locked"))
        wait_for(lambda: len(stack.outcomes("locked")) > before)  # lanes go on without it
        time.sleep(LOCKED_S)
    assert_succeeds(run)
    assert_read_back(stack.store("locked"), rows, tiny_llama())
    ends = set(final_states(stack, "locked").values())
    assert "COMPLETED" in ends and ends <= {"COMPLETED", "CANCELLED"}


@pytest.mark.debian
@pytest.mark.parametrize("stack", ["postgres"], indirect=True)
def test_no_process_shows_the_password_of_the_database(stack: RealStack) -> None:
    assert PASSWORD in stack.stack.database
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert any("prefect server start" in line for line in lines)
    assert not [line for line in lines if PASSWORD in line]
