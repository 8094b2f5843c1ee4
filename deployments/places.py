"""What a person names when asking about a run: a root's address, or the run of it."""

import shlex
from pathlib import Path
from uuid import UUID

from layertap.errors import InputError
from layertap.object_server import open_root
from layertap.store import Store


def open_place(place: str, state: Path | None) -> Store:
    """The root at an address, or that a flow run (id or name) works on.

    Raises:
        InputError: it is neither.
        NoServerError: Prefect's server doesn't answer, or refuses.
    """
    if is_address(place):
        return open_root(place, state)
    from deployments.bootstrap import require_server, server_answers

    require_server()
    from prefect.exceptions import ObjectNotFound

    from flows.cancel import place_of
    from tasks.storage import open_store

    try:
        with server_answers():
            storage, root = place_of(str(flow_run_of(place)))
    except ObjectNotFound as error:
        raise InputError(f"Prefect's server has no flow run {place}: name the root instead") from error
    except KeyError as error:
        raise InputError(f"{place} is a run that works on no root: name an extraction, or a root") from error
    return open_store(storage, root)


def quoted(place: str) -> str:
    """The same place for a command line: an address, or the run's id, for other runs may bear its name."""
    return shlex.quote(place if is_address(place) else str(flow_run_of(place)))


def is_address(place: str) -> bool:
    """Whether this is a root's address, and not a run."""
    return "://" in place or Path(place).exists()


def flow_run_of(place: str) -> UUID:
    """The newest flow run of that id or name.

    Raises:
        InputError: there is none.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    try:
        return UUID(place)
    except ValueError:
        pass
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[place])),
            sort=FlowRunSort.START_TIME_DESC,
            limit=1,
        )
    if not found:
        raise InputError(
            f"{place!r} is neither a folder, nor s3://bucket/prefix, nor the id or name of a flow run"
        )
    return found[0].id
