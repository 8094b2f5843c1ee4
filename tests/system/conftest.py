"""A real stack on free ports, and a small input for it: started once, by the command a user would type."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from deployments.stack import Stack
from tests.models import saved, tiny_llama
from tests.system.postgres import postgres
from tests.system.stacks import RealStack, free_ports, layertap


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny Llama."""
    return saved(tiny_llama(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session", params=["sqlite", pytest.param("postgres", marks=pytest.mark.debian)])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    """A stack with two lanes, with Prefect's server on either database."""
    state = tmp_path_factory.mktemp(request.param)
    with postgres(free_ports()[0]) if request.param == "postgres" else nullcontext("") as database:
        yield from _running(state, database)


def _running(state: Path, database: str) -> Iterator[RealStack]:
    port, s3_port = free_ports()
    stack = RealStack(Stack(state=state, port=port, s3_port=s3_port, database=database))
    stack.up()
    yield stack
    layertap("down", "--state", stack.state)
