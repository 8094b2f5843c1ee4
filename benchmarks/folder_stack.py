"""What a host needs to run extractions into a local folder: server, deployments, `layertap workers`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.stack import Stack, start_server

BLOCK = "whole-system"

STORAGE = f"local-file-system/{BLOCK}"
"""The storage block of the folder."""


@contextmanager
def stack_of(state: Path, store: Path, num_lanes: int, port: int) -> Iterator[Stack]:
    """Prefect's server with the deployments, a block for a folder, and the host's workers; ended afterwards.

    Args:
        state: folder for database and logs.
        store: folder that roots lie in.
        num_lanes: workers for lanes.
        port: of the server.
    """
    stack = Stack(state=state, port=port)
    stack.state.mkdir(parents=True, exist_ok=True)
    try:
        start_server(stack)
        stack.use()
        deploy_to(stack, store)
        workers = [sys.executable, "-m", "layertap.cli", "workers"]
        stack.daemon("control").start([*workers, "--control"], stack.environment())
        stack.daemon("lanes").start([*workers, "--lanes", str(num_lanes)], stack.environment())
        yield stack
    finally:
        for name in ("control", "lanes", "server"):
            stack.daemon(name).end(60)


def deploy_to(stack: Stack, store: Path) -> None:
    """Pools, deployments, automations, and the folder of results as a storage block."""
    from prefect.filesystems import LocalFileSystem

    from deployments.automations import make_automations
    from deployments.bootstrap import deploy, make_pools

    make_pools()
    deploy(stack.environment())
    make_automations()
    LocalFileSystem(basepath=str(store)).save(BLOCK, overwrite=True)


def let_in(num_lanes: int) -> None:
    """Have the work pool run so many lanes at once."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolUpdate

    from deployments.bootstrap import LANE_POOL

    with get_client(sync_client=True) as client:
        client.update_work_pool(LANE_POOL, WorkPoolUpdate(concurrency_limit=num_lanes))
