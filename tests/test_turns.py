"""Runs that are woken together for one root: one works, one waits and looks once more, the others end."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Cancelling, Completed, Running

from deployments import run_commands
from flows import cancel, turns
from flows.again import reextract_when_changed
from flows.parameters import Reextraction
from layertap.run_records import RunRecord, RunRecords
from layertap.store import Store

pytestmark = pytest.mark.usefixtures("prefect_server")


STORAGE = "s3-bucket/layertap"


def running(root: str, **form: Any) -> Any:
    """A run on a root that has just begun; its id."""
    parameters = {"reextraction": {"root": root, **form}}
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(reextract_when_changed, parameters=parameters)
        client.set_flow_run_state(run.id, Running(), force=True)
    return run.id


def end(run: Any, state: State[Any] | None = None) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, state or Completed(), force=True)


def states(*runs: Any) -> list[str | None]:
    with get_client(sync_client=True) as client:
        return [client.read_flow_run(run).state_name for run in runs]


@pytest.fixture
def turn_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether a run gets its turn; `meanwhile` happens while it waits, and it may not wait without one."""
    monkeypatch.setattr(turns, "get_run_logger", lambda: logging.getLogger("test"))

    def take(run: Any, form: Reextraction, meanwhile: Callable[[], None] | None = None) -> bool:
        def sleep(_: float) -> None:
            assert meanwhile, "it waits"
            meanwhile()

        monkeypatch.setattr(turns.time, "sleep", sleep)
        monkeypatch.setitem(turns.runtime.flow_run.FIELDS, "id", lambda: str(run))
        return turns.wait_for_turn(form)

    return take


def test_of_runs_on_a_root_one_works_one_waits_and_the_others_end(turn_of: Callable[..., bool]) -> None:
    elsewhere, *runs = running("b"), *(running("a") for _ in range(4))
    form = Reextraction(root="a")
    assert turn_of(runs[0], form)
    assert [turn_of(run, form) for run in runs[2:]] == [False, False]
    assert turn_of(runs[1], form, meanwhile=lambda: end(runs[0]))
    for run in (elsewhere, *runs):
        end(run)


def test_a_run_that_was_asked_for_something_else_waits_behind_all(turn_of: Callable[..., bool]) -> None:
    runs = [running("c"), running("c"), running("c", dataset="other")]
    left = iter(runs[:2])
    assert turn_of(runs[2], Reextraction(root="c", dataset="other"), meanwhile=lambda: end(next(left)))
    assert next(left, None) is None, "it waited for both"
    end(runs[2])


def test_a_run_that_is_being_cancelled_is_waited_for_and_named(
    turn_of: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    ahead, waiting = running("d"), running("d")
    end(ahead, Cancelling())
    with caplog.at_level(logging.INFO):
        assert turn_of(waiting, Reextraction(root="d"), meanwhile=lambda: end(ahead))
    assert states(ahead) == ["Completed"], "it waited"
    assert f"layertap cancel {ahead}" in caplog.text
    end(waiting)


def test_one_that_waited_and_is_being_cancelled_looks_for_nobody(turn_of: Callable[..., bool]) -> None:
    runs = [running("e") for _ in range(3)]
    end(runs[1], Cancelling())
    left = iter(runs[:2])
    assert turn_of(runs[2], Reextraction(root="e"), meanwhile=lambda: end(next(left)))
    assert next(left, None) is None, "it waited for both"
    end(runs[2])


def test_with_the_runs_on_a_root_those_are_cancelled_that_wait_there(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel, "PATIENCE_S", 0.0)  # nobody carries out what is asked of these runs
    works, waits, elsewhere = running("f"), running("f", still_s=5), running("g")
    request = {"root": "f", "storage": STORAGE}
    for run_id, started_by, asked in (("1", "", {}), ("2", str(works), request)):
        record = RunRecord(
            run_id=run_id, plan_id="plan", started_at=run_id, started_by=started_by, request=asked
        )
        RunRecords(folder_store).put(record)
    told = CliRunner().invoke(run_commands.cancel, [folder_store.uri, "--state", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert states(works, waits, elsewhere) == ["Cancelled", "Cancelled", "Running"]
    end(elsewhere)
