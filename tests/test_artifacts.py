"""What a run shows in Prefect's UI, and that it goes on where it can't."""

import logging
from typing import cast
from uuid import UUID

import httpx
import pytest

from layertap.report import Report
from tasks import artifacts
from tasks.artifacts import ProgressBoard, show_plan
from tests.test_dispatch import seen

ARTIFACT = UUID(int=1)


def test_a_server_that_is_away_when_the_run_begins_is_shown_it_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_away, shown = True, []

    def make(*_: object, **__: object) -> UUID:
        if is_away:
            raise httpx.ConnectError("refused")
        shown.append("made")
        return ARTIFACT

    monkeypatch.setattr(artifacts, "get_run_logger", lambda: logging.getLogger(__name__))
    monkeypatch.setattr(artifacts, "create_link_artifact", make)
    monkeypatch.setattr(artifacts, "create_table_artifact", make)
    monkeypatch.setattr(artifacts, "create_progress_artifact", make)
    monkeypatch.setattr(artifacts, "update_progress_artifact", lambda k, *_, **__: shown.append(k))
    monkeypatch.setattr(artifacts, "_update_table", lambda k, *_: shown.append(k))
    show_plan([("rows", "3")], "s3://bucket/root")
    board = ProgressBoard()
    board.show(seen(), last=True)
    assert shown == []
    is_away = False
    board.show(seen(), last=True)
    assert shown == ["made", "made"]
    board.show(seen(), last=True)
    assert shown[2:] == [ARTIFACT, ARTIFACT]


def test_nothing_says_that_a_run_waits_once_it_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(artifacts, "get_run_logger", lambda: logging.getLogger(__name__))
    monkeypatch.setattr(
        artifacts, "create_progress_artifact", lambda *told: shown.append(told[-1]) or ARTIFACT
    )
    monkeypatch.setattr(
        artifacts, "update_progress_artifact", lambda *_, description: shown.append(description)
    )
    monkeypatch.setattr(artifacts, "create_table_artifact", lambda *_: ARTIFACT)
    monkeypatch.setattr(artifacts, "_update_table", lambda *_: None)
    board = ProgressBoard()
    board.show(seen(), last=True)
    progress = shown[-1]
    board.conclude(cast(Report, "all stored"))
    assert shown[-1] == progress
    board._progress_due = 0.0
    board.show_waiting("waiting for the store")
    assert shown[-1] == "waiting for the store"
    board.conclude(cast(Report, "all stored"))
    assert shown[-1] == "all stored"
