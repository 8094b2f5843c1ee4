"""The `layertap` command.

The commands that need no scheduler lie in `layertap/commands`. Further ones are found through the entry
points of the group `layertap.commands`; those of this project lie in `deployments`.
"""

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import click

from layertap import __version__
from layertap.commands import looking, planning, training, upkeep
from layertap.errors import InputError, LayertapError

COMMANDS_GROUP = "layertap.commands"


class Failure(click.ClickException):
    """An error that layertap raised on purpose, as a line on stderr and an exit code."""

    def __init__(self, error: LayertapError) -> None:
        super().__init__(str(error))
        self.exit_code = 2 if isinstance(error, InputError) else 1  # type: ignore[misc]


class Commands(click.Group):
    """The commands defined here, in the order of a first use, then those of the entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands; nothing is imported for it."""
        return [*self.commands, *sorted(entry_points(group=COMMANDS_GROUP).names - self.commands.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        return next((_load(entry) for entry in entry_points(group=COMMANDS_GROUP, name=cmd_name)), None)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what it raises on purpose becomes a line on stderr."""
        try:
            return super().invoke(ctx)
        except LayertapError as error:
            raise Failure(error) from error


def _load(entry: EntryPoint) -> click.Command:
    """The command of an entry point, or one that says why it can't be had."""
    try:
        command: click.Command = entry.load()
        return command
    except ImportError as error:
        reason = f"Not available: {error}"

        def refuse(**_: Any) -> None:
            raise click.ClickException(reason)

        return click.Command(entry.name, callback=refuse, help=reason)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="layertap")
def main() -> None:
    """Tap layers of a target language model over a tokenised dataset, and store the hidden states.

    A first run: `prepare` turns chats into tokens, `plan` says what an extraction will cost, `up` starts
    a Prefect server, an object store and workers on this machine, `run` extracts.
    """


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(["writes", "engine", "planning", "reader", "forward"]))
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to write, on the disk to be measured; some 25 GB [default: the system's temporary folder].",
)
@click.option(
    "--json",
    "out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("bench.json"),
    show_default=True,
    help="File for all figures.",
)
def bench(names: tuple[str, ...], folder: Path | None, out: Path) -> None:
    """Measure layertap on this machine, all of it or the benchmarks of NAMES, in a quarter of an hour.

    Each is a ratio of two things taken in turns: `writes` against a file a sample, on a folder and on the
    embedded S3 server; `engine`, around a target that costs nothing, against a plain write; `planning` of
    913,786 rows against a hash; `reader` against plain reads of the same files, and a file a sample;
    `forward`, where there is a GPU, against eager batches, a row at a time, and the matrix product.
    """
    from layertap.bench.command import run, run_all

    if names:
        run(names, folder, out)
    else:
        run_all(folder, out)


BEFORE_A_RUN = (planning.prepare, planning.plan, planning.fetch_target)
AFTER_IT = (looking.inspect, looking.status, training.vocab_map, training.check_served, training.export)
NOW_AND_THEN = (upkeep.verify, upkeep.void, upkeep.gc, upkeep.prune, bench)

for command in (*BEFORE_A_RUN, *AFTER_IT, *NOW_AND_THEN):
    main.add_command(command)


if __name__ == "__main__":
    main()
