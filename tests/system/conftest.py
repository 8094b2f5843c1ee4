"""A real stack on free ports, and a small input for it: started once, by the command a user would type."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from deployments.daemons import check_port_free
from deployments.stack import Stack
from layertap.errors import InputError
from layertap.object_server import ServerPorts
from tests.models import saved, tiny_llama
from tests.system.postgres import postgres
from tests.system.stacks import RealStack, layertap


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny Llama."""
    return saved(tiny_llama(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session", params=["sqlite", pytest.param("postgres", marks=pytest.mark.debian)])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    """A stack with two lanes, with Prefect's server on either database."""
    state = tmp_path_factory.mktemp(request.param)
    with postgres(_free_ports()[0]) if request.param == "postgres" else nullcontext("") as database:
        yield from _running(state, database)


def _running(state: Path, database: str) -> Iterator[RealStack]:
    port, s3_port = _free_ports()
    stack = RealStack(Stack(state=state, port=port, s3_port=s3_port, database=database))
    stack.up()
    yield stack
    layertap("down", "--state", stack.state)


def _free_ports() -> tuple[int, int]:
    """A port for Prefect, and the first of five in a row for the object server."""
    while True:
        first = random.randrange(12_000, 20_000, 10)
        try:
            check_port_free(first, purpose="a test", option="")
            ServerPorts(
                s3=first + 1, master=first + 2, volume=first + 3, filer=first + 4, admin=first + 5
            ).check_free()
            return first, first + 1
        except InputError:
            continue
