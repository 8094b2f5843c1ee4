"""Commands that ask Prefect's server: what they send it, and one line when it doesn't do it."""

from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result
from prefect.settings import PREFECT_API_URL, temporary_settings

from layertap.cli import main
from tests.fake_prefect import answering


def layertap(port: int, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """A command whose server listens on a port."""
    url = f"http://127.0.0.1:{port}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    with temporary_settings({PREFECT_API_URL: url}):
        return CliRunner().invoke(main, list(arguments))


def test_notify_sends_the_event_that_the_deployment_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(204) as server:
        told = layertap(server.server_port, monkeypatch, "notify", "model/chats")
    assert (told.exit_code, told.output) == (0, "said that the dataset of model/chats may have changed\n")
    ((path, (event,)),) = server.posted
    assert (path, event["event"]) == ("/api/events", "dataset.updated")
    assert event["payload"] == {"root": "model/chats", "storage": "s3-bucket/layertap"}
    assert event["resource"]["prefect.resource.id"] == "layertap.root.s3-bucket/layertap/model/chats"


def test_notify_fails_where_nobody_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    away = layertap(9, monkeypatch, "notify", "model/chats")
    with answering(401) as server:
        refused = layertap(server.server_port, monkeypatch, "notify", "model/chats")
    assert [away.exit_code, refused.exit_code] == [1, 1]
    assert [away.stdout, refused.stdout] == ["", ""]
    assert "doesn't answer" in away.stderr and "PREFECT_API_AUTH_STRING" in refused.stderr


def test_notify_takes_no_address_for_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    told = layertap(9, monkeypatch, "notify", "s3://bucket/model/chats")
    assert told.exit_code == 2
    assert "root 's3://bucket/model/chats' is not like qwen3-8b/chats" in told.stderr


RUN = str(uuid4())
PREPARATION = {"id": RUN, "flow_id": RUN, "parameters": {"preparation": {"chats": "chats.jsonl"}}}
EXTRACTION = ["run", "rows", "--target", "org/model", "--layers", "1", "--root", "model/run-1"]


@pytest.mark.parametrize(
    ("arguments", "status", "body", "code", "told"),
    [
        (EXTRACTION, 401, None, 1, "set PREFECT_API_AUTH_STRING"),
        (["failures", RUN], 401, None, 1, "set PREFECT_API_AUTH_STRING"),
        (["failures", "chats from rows"], 401, None, 1, "set PREFECT_API_AUTH_STRING"),
        (["failures", RUN], 404, None, 2, f"no flow run {RUN}: name the root"),
        (["failures", RUN], 200, PREPARATION, 2, f"{RUN} is a run that works on no root"),
    ],
)
def test_what_the_server_refuses_or_knows_not_is_told_in_one_line(
    arguments: list[str], status: int, body: Any, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(status, body) as server:
        result = layertap(server.server_port, monkeypatch, *arguments)
    assert result.exit_code == code, result.output
    assert told in result.stderr and result.stderr.count("\n") == 1
