"""Runs that are woken together for one root: one works, one waits and looks once more, the others end."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Completed, Running

from flows import turns
from flows.again import reextract_when_changed
from flows.parameters import Reextraction

pytestmark = pytest.mark.usefixtures("prefect_server")


def running(root: str, **form: Any) -> Any:
    """A run on a root that has just begun; its id."""
    parameters = {"reextraction": {"root": root, **form}}
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(reextract_when_changed, parameters=parameters)
        client.set_flow_run_state(run.id, Running(), force=True)
    return run.id


def end(run: Any) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, Completed(), force=True)


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
