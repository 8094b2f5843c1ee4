"""Operating runs through Prefect's API and the command line."""

import time
from pathlib import Path

import pytest

from layertap import HiddenStates
from layertap.versions import Versions
from tests.models import tiny_llama
from tests.runs import Rows, assert_read_back, save_rows, some_rows
from tests.system.stacks import (
    RealStack,
    failing_layertap,
    failing_run,
    layertap,
    run_of,
    wait_for,
    working_lanes,
)
from tests.system.test_extraction import assert_succeeds, final_states, run_under_way

ON_POSTGRES = pytest.param("postgres", marks=pytest.mark.debian)
ON_SQLITE = pytest.param("sqlite", marks=pytest.mark.long)

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("stack", [ON_SQLITE, ON_POSTGRES], indirect=True),
]

SILENCE_S = 60.0
"""Seconds; two heartbeats, of which Prefect sends no more than one in 30 s."""


def state_of(stack: RealStack, flow_run: str) -> str:
    (found,) = stack.ask("flow_runs", flow_runs={"id": {"any_": [flow_run]}})
    return str(found["state_type"])


def set_state(stack: RealStack, flow_run: str, kind: str, name: str) -> None:
    """What the buttons of the UI do."""
    stack.post(f"flow_runs/{flow_run}/set_state", {"state": {"type": kind, "name": name}})


def test_an_updated_dataset_is_extracted_by_what_is_new_in_it_and_an_event_for_nothing_is_skipped(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    dataset = tmp_path / "rows"
    rows = some_rows(1000)
    layertap(*stack.run_options(save_rows(rows, dataset), target, "updated", shard_tokens=6000))

    changed, added, masked = some_rows(50, seed=7), some_rows(20, seed=8), range(300, 330)
    new: Rows = [*changed, *rows[50:990], *added]
    new = [
        {**row, "loss_mask": [1] * len(row["loss_mask"])} if k in masked else row for k, row in enumerate(new)
    ]
    other = save_rows(new, tmp_path / "new")
    dataset.rename(tmp_path / "old")
    Path(other).rename(dataset)

    stack.layertap("notify", "updated")
    done = run_of(stack, "reextract_when_changed", "updated", "COMPLETED")
    assert "1,010 of 1,010 rows are stored, 0 are missing: version 2" in done["state"]["message"]
    assert "; 70 rows computed now" in done["state"]["message"]
    store, model = stack.store("updated"), tiny_llama()
    assert_read_back(store, new, model)
    assert len(HiddenStates(store, version=1)) == 1000
    removed = {tuple(row["input_ids"]) for row in rows[990:]}
    assert not removed & {tuple(row["input_ids"].tolist()) for row in HiddenStates(store)}

    stack.layertap("notify", "updated")

    def skipped() -> bool:
        return [r["state_name"] for r in stack.runs_of("reextract_when_changed", "updated")][1:] == [
            "Skipped"
        ]

    wait_for(skipped)
    assert Versions(store).numbers() == [1, 2]


def test_a_run_cancelled_in_the_ui_frees_its_lanes_and_retry_computes_only_the_rest(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(1003, seed=1)
    run = run_under_way(stack, save_rows(rows, tmp_path / "rows"), target, "cancelled")
    engines = [stack.engine(lane["id"]) for lane in working_lanes(stack, "cancelled")]
    (coordinator,) = stack.runs_of("extract_hidden_states", "cancelled")
    set_state(stack, coordinator["id"], "CANCELLING", "Cancelling")
    asked_at = time.monotonic()
    wait_for(lambda: not any(engine.is_running() for engine in engines), timeout_s=60)
    print(f"the lanes' processes were gone {time.monotonic() - asked_at:.0f} s after Cancel")
    run_of(stack, "extract_hidden_states", "cancelled", "CANCELLED")
    assert set(final_states(stack, "cancelled").values()) <= {"CANCELLED", "COMPLETED"}
    assert run.wait(120) == 1

    before = set(stack.outcomes("cancelled"))
    assert len(before) > 0
    told = stack.layertap("retry", "cancelled from rows", "--lanes", "1")
    assert "1,003 of 1,003 rows are stored" in told
    assert before <= set(stack.outcomes("cancelled"))
    assert_read_back(stack.store("cancelled"), rows, tiny_llama())


def test_a_run_whose_coordinator_is_dead_is_cancelled_through_the_store(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    dataset = save_rows(some_rows(1003, seed=3), tmp_path / "rows")
    run = run_under_way(stack, dataset, target, "orphaned")
    lanes = [stack.engine(lane["id"]) for lane in working_lanes(stack, "orphaned")]
    (coordinator,) = stack.runs_of("extract_hidden_states", "orphaned")
    engine = stack.engine(coordinator["id"])
    supervisor = stack.stack.daemon("control").process()
    assert supervisor is not None
    workers = supervisor.children()
    for process in (supervisor, *workers, engine):
        process.kill()
    assert stack.runs_of("extract_hidden_states", "orphaned")[0]["state_type"] == "RUNNING"

    told = stack.layertap("cancel", stack.store("orphaned").uri)
    assert "1 of them had no process left" in told
    assert not any(lane.is_running() for lane in lanes)
    assert stack.runs_of("extract_hidden_states", "orphaned")[0]["state_type"] == "CANCELLED"
    assert run.wait(120) == 1
    stack.up()


def test_a_server_that_restarts_in_mid_run_stops_nothing(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(1003, seed=4)
    run = run_under_way(stack, save_rows(rows, tmp_path / "rows"), target, "restarted")
    server = stack.stack.daemon("server").process()
    assert server is not None
    for process in (server, *server.children(recursive=True)):
        process.kill()
    before = len(stack.outcomes("restarted"))
    wait_for(lambda: len(stack.outcomes("restarted")) > before)  # lanes go on without it
    stack.up()
    assert_succeeds(run)
    assert_read_back(stack.store("restarted"), rows, tiny_llama())


def kill_hosts(stack: RealStack, flow_runs: list[str]) -> None:
    """As a power cut does: workers and engines die, and nobody tells the server."""
    engines = [stack.engine(flow_run) for flow_run in flow_runs]
    for name in ("control", "lanes"):
        supervisor = stack.stack.daemon(name).process()
        assert supervisor is not None
        for process in (supervisor, *supervisor.children()):
            process.kill()
    for engine in engines:
        engine.kill()


def test_after_a_power_cut_runs_are_found_dead_and_the_coordinator_starts_again(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(1003, seed=9)
    stack.declare_dead_after(SILENCE_S)
    run = run_under_way(stack, save_rows(rows, tmp_path / "rows"), target, "power-cut")
    (coordinator,) = stack.runs_of("extract_hidden_states", "power-cut")
    lanes = working_lanes(stack, "power-cut")
    dead = [coordinator["id"], *(lane["id"] for lane in lanes)]
    wait_for(lambda: all(map(stack.num_heartbeats, dead)))
    before = set(stack.outcomes("power-cut"))
    kill_hosts(stack, dead)
    assert {state_of(stack, flow_run) for flow_run in dead} == {"RUNNING"}

    stack.start_workers()
    output, _ = run.communicate(timeout=400)
    # who follows the run hears of the crash, unless it goes on before the next look
    assert run.returncode == 0 or "Crashed: no heartbeat for 60 s" in output
    again = run_of(stack, "extract_hidden_states", "power-cut", "COMPLETED")
    assert (again["id"], again["run_count"]) == (coordinator["id"], 2)
    wait_for(lambda: {state_of(stack, lane["id"]) for lane in lanes} == {"CRASHED"})
    assert set(final_states(stack, "power-cut").values()) <= {"CRASHED", "COMPLETED", "CANCELLED"}
    assert before <= set(stack.outcomes("power-cut"))
    assert_read_back(stack.store("power-cut"), rows, tiny_llama())
    stack.up()


def test_a_shard_that_fails_says_why_and_is_retried_when_the_reason_is_gone(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(300, seed=5)
    with failing_run(stack, save_rows(rows, tmp_path / "rows"), target, "failing") as output:
        assert "shard 1 with: IntegrityError" in output
        uri = stack.store("failing").uri
        told = failing_layertap("failures", uri, "--state", stack.state)
    for expected in ("shard-00001.arrow has the checksum", "Traceback", "failed for good", "layertap void"):
        assert expected in told
    (coordinator,) = stack.runs_of("extract_hidden_states", "failing")
    artifacts = stack.ask("artifacts", flow_runs={"id": {"any_": [coordinator["id"]]}})
    (shown,) = [a["data"] for a in artifacts if a["key"] == "layertap-failures"]
    assert "IntegrityError" in shown and f"layertap void {uri}" in shown

    deployment = stack.ask("deployments", deployments={"name": {"any_": ["retry-failed-shards"]}})[0]["id"]
    form = {"retry": {"root": "failing", "shards": [1]}}
    # As the form of the deployment does in the UI.
    stack.post(f"deployments/{deployment}/create_flow_run", {"parameters": form})
    run_of(stack, "retry_failed_shards", "failing", "COMPLETED")
    assert_read_back(stack.store("failing"), rows, tiny_llama())
    assert "0 shards have failed" in stack.layertap("failures", uri)


def test_a_lane_that_is_retried_in_the_ui_computes_what_is_missing_and_its_run_then_publishes(
    stack: RealStack, target: str, tmp_path: Path
) -> None:
    rows = some_rows(300, seed=9)
    with failing_run(stack, save_rows(rows, tmp_path / "rows"), target, "lane-again"):
        pass
    before = {path: stack.store("lane-again").head(path) for path in stack.outcomes("lane-again")}

    lane = stack.runs_of("extraction_lane", "lane-again")[0]["id"]
    set_state(stack, lane, "SCHEDULED", "AwaitingRetry")
    wait_for(lambda: state_of(stack, lane) == "COMPLETED")
    (again,) = stack.ask("flow_runs", flow_runs={"id": {"any_": [lane]}})
    assert again["state"]["message"].startswith("1 shards committed")
    after = {path: stack.store("lane-again").head(path) for path in stack.outcomes("lane-again")}
    assert len(after) == len(before) + 1 and before.items() <= after.items()

    (coordinator,) = stack.runs_of("extract_hidden_states", "lane-again")
    set_state(stack, coordinator["id"], "SCHEDULED", "AwaitingRetry")
    done = run_of(stack, "extract_hidden_states", "lane-again", "COMPLETED")
    assert "300 of 300 rows are stored" in done["state"]["message"]
    assert stack.outcomes("lane-again") == [*after]
    assert_read_back(stack.store("lane-again"), rows, tiny_llama())
