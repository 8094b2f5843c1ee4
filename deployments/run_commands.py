"""Commands about runs that were started: `failures`, `retry`, `cancel`, `notify`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deployments.commands import state_option
from deployments.places import flow_run_of, is_address, open_place, quoted
from flows import DEFAULT_STORAGE
from layertap.errors import InputError

if TYPE_CHECKING:
    from layertap.store import Store

place_argument = click.argument("place", metavar="ROOT|RUN")


class ShardList(click.ParamType[tuple[int, ...]]):
    """`3,7` as a tuple of shard numbers."""

    name = "shards"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The option's text as a value."""
        if not all(part.isdecimal() for part in value.split(",")):
            self.fail(f"{value!r} is not a list of shards such as 3,7", param, ctx)
        return tuple(map(int, value.split(",")))


shards_option = click.option("--shards", type=ShardList(), help="Of these shards only: 3,7.")


def use_stack(state: Path) -> Path | None:
    """Talk to the stack of `layertap up` in `state`, unless PREFECT_API_URL names a server; its folder."""
    from deployments.stack import Stack

    stack = Stack.load(state)
    if stack is None or "PREFECT_API_URL" in os.environ:
        return None
    stack.use()
    return stack.state


def _open(place: str, state: Path) -> "Store":
    return open_place(place, use_stack(state))


@click.command()
@place_argument
@shards_option
@click.option("--plan", "plan_id", help="Of this plan only.")
@state_option
def failures(place: str, shards: tuple[int, ...] | None, plan_id: str | None, state: Path) -> None:
    """Say which shards failed, why, where, and how to try them again.

    ROOT is a folder or s3://bucket/prefix, RUN the id or name of a flow run. The exit code is 1 if a shard
    has failed for good.
    """
    from layertap.catalog import Catalog
    from layertap.failures import HOPELESS, read_failures

    store = _open(place, state)
    found = read_failures(Catalog(store), plans=[plan_id] if plan_id else (), shards=shards or ())
    for failure in found:
        click.echo(f"{failure}\n")
    hopeless = [failure for failure in found if failure.state == HOPELESS]
    click.echo(f"{len(found):,} shards have failed, {len(hopeless):,} of them for good")
    if not all(failure.way_out for failure in hopeless):
        click.echo(f"try them again: layertap retry {quoted(place)}")
    if hopeless:
        raise SystemExit(1)


@click.command()
@place_argument
@shards_option
@click.option("--lanes", type=click.IntRange(min=1), help="GPUs to use [default: as before].")
@state_option
def retry(place: str, shards: tuple[int, ...] | None, lanes: int | None, state: Path) -> None:
    """Finish what the last run on a root left undone, and follow it to its end.

    The run may be long gone: its settings are in the root. Only what is missing is computed.
    """
    store = _open(place, state)
    from deployments.bootstrap import require_server

    require_server()
    from deployments.runs import follow_deployment
    from layertap.run_records import RunRecords

    asked = RunRecords(store).latest().request
    form = {
        "root": asked["root"],
        "storage": asked["storage"],
        "shards": list(shards or ()),
        "num_lanes": lanes or 0,
    }
    follow_deployment("retry_failed_shards/retry-failed-shards", {"retry": form})


@click.command()
@place_argument
@state_option
def cancel(place: str, state: Path) -> None:
    """End an extraction: all its lanes, and the coordinator if it lives.

    Of a ROOT all runs are ended that have begun to extract, and those of `reextract-when-changed` that wait
    for their turn; of a RUN that one, also while it waits or plans.
    What is committed stays; `retry` goes on with the rest.
    """
    store = _open(place, state)
    from deployments.bootstrap import require_server

    require_server()
    from flows.cancel import cancel_flow_run, cancel_runs
    from layertap.run_records import RunRecords

    if not is_address(place):
        click.echo(cancel_flow_run(str(flow_run_of(place))))
        return
    runs = RunRecords(store).all()
    if not runs:
        raise InputError(
            f"no run of {place} has begun to extract; to end one that waits or plans: layertap cancel RUN"
        )
    asked = {(run.request["storage"], run.request["root"]) for run in runs if run.request}
    click.echo(cancel_runs(store, runs, waiting_on=asked))


@click.command()
@click.argument("root")
@click.option("--storage", default=DEFAULT_STORAGE, show_default=True, help="Prefect storage block.")
@state_option
def notify(root: str, storage: str, state: Path) -> None:
    """Say that the dataset of ROOT may have changed, so that `reextract-when-changed` looks at it.

    ROOT is the folder under the storage block. To say it twice, or for nothing, costs nothing.
    """
    use_stack(state)
    from deployments.bootstrap import require_server, server_answers

    require_server()
    from prefect.client.orchestration import get_client
    from prefect.events import Event, Resource

    from flows.parameters import Reextraction

    Reextraction.checked({"root": root, "storage": storage})  # nobody would hear that the run can't be made
    told = Event(
        event="dataset.updated",
        resource=Resource(
            {"prefect.resource.id": f"layertap.root.{storage}/{root}", "prefect.resource.name": root}
        ),
        payload={"root": root, "storage": storage},
    )
    # Not `emit_event`: that sends in the background, and tells nobody that it could not.
    with server_answers(), get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[told.model_dump(mode="json")])
    click.echo(f"said that the dataset of {root} may have changed")
