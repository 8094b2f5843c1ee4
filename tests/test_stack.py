"""The embedded stack: who is told the address of its database, which may hold a password."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deployments import stack
from deployments.commands import DATABASE_VARIABLE
from deployments.stack import Stack
from layertap.cli import main

DATABASE = "postgresql+asyncpg://layertap:hunter2@db.example.org/prefect"


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


def test_the_address_of_the_database_is_taken_from_prefect_s_own_variable(started: list[Stack]) -> None:
    assert up(**{DATABASE_VARIABLE: DATABASE}).exit_code == 0
    assert up("--database", "postgresql+asyncpg://layertap@db/prefect").exit_code == 0
    assert [one.database for one in started] == [DATABASE, "postgresql+asyncpg://layertap@db/prefect"]


def test_what_is_no_address_is_refused(started: list[Stack]) -> None:
    refused = up("--database", "db.example.org")
    assert refused.exit_code == 2 and "it isn't like postgresql+asyncpg://" in refused.stderr


def test_the_server_alone_is_told_the_database(tmp_path: Path) -> None:
    told = Stack(state=tmp_path, database=DATABASE)
    assert told.server_environment()[DATABASE_VARIABLE] == DATABASE
    assert "hunter2" not in str(told.environment())
