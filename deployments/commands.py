"""Commands that operate a deployment: `up`, `down`, `workers`, `run`; found through entry points."""

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from flows import DEFAULT_STORAGE
from layertap.commands.options import NameValue, chosen_layers, target_options

DATABASE_VARIABLE = "LAYERTAP_DATABASE"
"""The stack's own, for Prefect's may name a server's database; an environment only its owner can read."""

state_option = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".layertap"),
    show_default=True,
    help="Folder of the embedded stack: database, objects, logs.",
)

lanes_option = click.option(
    "--lanes",
    type=click.IntRange(min=1),
    help="Lanes to run [default: one for each GPU, 1 without a GPU].",
)


def _without_password(ctx: click.Context, param: click.Parameter, url: str) -> str:
    """Refuse a password where everybody on this machine can read it: in the list of processes."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url or "sqlite://")
    except (ArgumentError, ValueError):  # which may quote the password
        raise click.BadParameter("it isn't like postgresql+asyncpg://USER@HOST/DATABASE") from None
    is_typed = ctx.get_parameter_source("database") is ParameterSource.COMMANDLINE
    if is_typed and (parsed.password or "password" in parsed.query):
        raise click.BadParameter(
            "its password is in the list of processes now, for everybody on this machine: change it, "
            f"and give the address as the environment variable {DATABASE_VARIABLE}"
        )
    return url


@click.command()
@state_option
@lanes_option
@click.option("--port", default=4200, show_default=True, help="Port of Prefect's API and UI.")
@click.option("--s3-port", default=8333, show_default=True, help="First of the object server's five ports.")
@click.option(
    "--database",
    default="",
    metavar="URL",
    envvar=DATABASE_VARIABLE,
    show_envvar=True,
    callback=_without_password,
    help="Prefect's: postgresql+asyncpg://…, with a password by the variable only [default: SQLite]",
)
def up(state: Path, lanes: int | None, port: int, s3_port: int, database: str) -> None:
    """Start Prefect, an object store and workers on this machine.

    Everything listens on loopback and keeps its data in the folder of --state. Called again, it starts what
    doesn't run; a folder keeps the database that it was first started with.
    """
    from deployments import stack

    started = stack.Stack(state=state.resolve(), port=port, s3_port=s3_port, database=database)
    stack.up(started, num_lanes=lanes, say=lambda what: click.echo(f"starting {what} …"))
    click.echo(f"Prefect's UI   {started.ui_url}/v2/")
    click.echo(f"database       {started.database_name}")
    click.echo(f"storage block  {stack.STORAGE}")
    click.echo(f"logs           {started.state / 'logs'}")


@click.command()
@state_option
def down(state: Path) -> None:
    """Stop what `up` started; its data stay.

    Flow runs that are under way end as Cancelled or Crashed; started again, they go on where they were.
    """
    from deployments import stack

    ended = stack.down(stack.Stack(state=state.resolve()))
    click.echo(f"stopped: {', '.join(ended)}" if ended else f"nothing runs from {state}")


@click.command()
@lanes_option
@click.option("--control", is_flag=True, help="Run coordinators instead of lanes; needs no GPU.")
def workers(lanes: int | None, control: bool) -> None:
    """Run this host's workers, one for each GPU, until Ctrl-C or SIGTERM.

    Each takes lanes from the Prefect server that PREFECT_API_URL names. When the workers are
    stopped, flow runs under way end as Crashed, and their coordinator sends other lanes.
    """
    from deployments.bootstrap import require_server
    from deployments.workers import control_workers, lane_workers, supervise

    require_server()
    supervise(control_workers() if control else lane_workers(lanes))


@click.command()
@click.argument("dataset")
@target_options
@click.option("--root", required=True, help="Folder under the storage block for what is extracted.")
@click.option("--storage", default=DEFAULT_STORAGE, show_default=True, help="Prefect storage block.")
@click.option(
    "--lanes", "num_lanes", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs to use."
)
@click.option(
    "--max-refused-share", default=0.01, show_default=True, help="Share of rows that may be missing."
)
@click.option("--strict", is_flag=True, help="Fail when any row is missing: --max-refused-share 0.")
@click.option(
    "--param",
    "further",
    type=NameValue(),
    multiple=True,
    help="Another parameter of the run form, such as split=train; may be repeated.",
)
@state_option
def run(
    dataset: str,
    target: str,
    layers: tuple[int, ...] | None,
    drafter: Path | None,
    strict: bool,
    further: tuple[tuple[str, Any], ...],
    state: Path,
    **form: Any,
) -> None:
    """Extract the hidden states of DATASET through Prefect, and follow the run to its end.

    The run goes to the server of `layertap up`, or to the one that PREFECT_API_URL names. The exit code is 0
    when the rows that are missing are within the policy.
    """
    from deployments.stack import Stack

    stack = Stack.load(state)
    if stack and "PREFECT_API_URL" not in os.environ:
        stack.use()
    from deployments.bootstrap import require_server

    require_server()
    from deployments.runs import run_extraction

    form |= {"dataset": _path(dataset), "target": _path(target), "layer_ids": chosen_layers(layers, drafter)}
    form |= {"revision": form["revision"] or ""} | ({"max_refused_share": 0.0} if strict else {})
    run_extraction(form | dict(further))


def _path(name: str) -> str:
    """The whole path of what is there on this host, since workers run in other folders; else as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name
