"""The embedded stack: who is told the address of its database, which may hold a password."""

import re
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner, Result

from deployments import stack
from deployments.commands import DATABASE_VARIABLE
from deployments.daemons import DaemonError
from deployments.stack import Stack
from layertap.cli import main
from layertap.errors import InputError

DATABASE = "postgresql+asyncpg://layertap:hunter2@db.example.org/prefect"
SHOWN = "postgresql+asyncpg://layertap@db.example.org/prefect"

PREFECT_VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


class Begun(Exception):
    """Of `begin`, instead of what would be started."""


def begin(_: str) -> NoReturn:
    raise Begun


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Stack]:
    """Stacks that would have been started."""
    stacks: list[Stack] = []
    monkeypatch.setattr(stack, "up", lambda stack, **_: stacks.append(stack))
    return stacks


def up(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(main, ["up", *arguments], env=variables)


@pytest.mark.parametrize("database", [DATABASE, "postgresql+asyncpg://db/prefect?user=a&password=hunter2"])
def test_a_password_on_the_command_line_is_refused_with_the_way_out(
    started: list[Stack], database: str
) -> None:
    refused = up("--database", database)
    assert refused.exit_code == 2 and not started
    assert f"environment variable {DATABASE_VARIABLE}" in " ".join(refused.stderr.split())
    assert "hunter2" not in refused.stderr


def test_the_address_of_the_database_is_taken_from_a_variable_and_shown_without_its_password(
    started: list[Stack],
) -> None:
    told = up(**{DATABASE_VARIABLE: DATABASE})
    assert told.exit_code == 0 and started[0].database == DATABASE
    assert f"database       {SHOWN}\n" in told.output and "hunter2" not in told.output
    assert up("--database", SHOWN).exit_code == 0 and started[1].database == SHOWN


def test_the_database_of_another_prefect_server_is_left_alone(started: list[Stack]) -> None:
    assert up(**{PREFECT_VARIABLE: DATABASE}).exit_code == 0
    assert started[0].server_environment()[PREFECT_VARIABLE].startswith("sqlite+aiosqlite:///")


@pytest.mark.parametrize("database", ["db.example.org", "postgresql+asyncpg://layertap:hunter2/prefect"])
def test_what_is_no_address_is_refused(started: list[Stack], database: str) -> None:
    refused = up(**{DATABASE_VARIABLE: database})
    assert refused.exit_code == 2 and "it isn't like postgresql+asyncpg://" in refused.stderr
    assert "hunter2" not in refused.stderr


def test_the_server_alone_is_told_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATABASE_VARIABLE, DATABASE)
    told = Stack(state=tmp_path, database=DATABASE)
    assert told.server_environment()[PREFECT_VARIABLE] == DATABASE
    assert "hunter2" not in str(told.environment())


def test_a_folder_keeps_its_database_whatever_its_password_is_now(tmp_path: Path) -> None:
    Stack(state=tmp_path, database=DATABASE).save()
    with pytest.raises(InputError, match=f"{re.escape(SHOWN)}.*{DATABASE_VARIABLE}.*--state") as refused:
        stack.up(Stack(state=tmp_path), num_lanes=1, say=begin)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(Begun):
        stack.up(Stack(state=tmp_path, database=f"{SHOWN}?password=new"), num_lanes=1, say=begin)


def test_a_database_that_no_server_started_on_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_server(_: Stack) -> NoReturn:
        raise DaemonError("it can't connect")

    monkeypatch.setattr(stack, "_start_objects", lambda _: None)
    monkeypatch.setattr(stack, "start_server", no_server)
    with pytest.raises(DaemonError):
        stack.up(Stack(state=tmp_path, database=DATABASE), num_lanes=1, say=lambda _: None)
    assert Stack.load(tmp_path) is None


def test_what_may_hold_a_password_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "stack.json").touch(mode=0o644)
    Stack(state=tmp_path, database=DATABASE).save()
    assert (tmp_path / "stack.json").stat().st_mode & 0o777 == 0o600
