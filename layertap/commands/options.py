"""Options that several commands share, and the tables they print."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
from rich import box
from rich.table import Column, Table

from layertap.errors import SpecError
from layertap.spec import DTypeName, LastHiddenState


class LayerIds(click.ParamType[tuple[int, ...]]):
    """`1,16,31` as a tuple of layer ids."""

    name = "ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The option's text as a value."""
        if not all(part.strip().isdecimal() for part in value.split(",")):
            self.fail(f"{value!r} is not a list of layer ids such as 1,16,31; they count from 0", param, ctx)
        return tuple(map(int, value.split(",")))


class NameValue(click.ParamType[tuple[str, Any]]):
    """`name=value` as a pair; the value is JSON where it can be read as such, else text."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """The option's text as a value."""
        name, separator, text = value.partition("=")
        if not name or not separator:
            self.fail(f"{value!r} is not name=value", param, ctx)
        try:
            return name, json.loads(text)
        except json.JSONDecodeError:
            return name, text


state_option = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the embedded stack that holds the root, for its address and keys.",
)


def target_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what is extracted from which target."""
    options = [
        click.option("--target", required=True, metavar="ID|FOLDER", help="Target model."),
        click.option("--revision", help="Hub revision of the target."),
        click.option("--layers", type=LayerIds(), help="0-based decoder-layer outputs, such as 1,16,31."),
        click.option(
            "--drafter",
            type=click.Path(exists=True, path_type=Path),
            help="Read the layers from a drafter's config.json instead.",
        ),
        click.option(
            "--last-hidden-state",
            type=click.Choice(get_args(LastHiddenState)),
            default="pre_norm",
            show_default=True,
            help="The last layer's output before or after the final norm, or none.",
        ),
        click.option(
            "--dtype", type=click.Choice(get_args(DTypeName)), default="bfloat16", show_default=True
        ),
        click.option("--max-length", type=int, default=4096, show_default=True, help="Tokens kept of a row."),
        click.option(
            "--too-long",
            type=click.Choice(["truncate", "refuse"]),
            default="truncate",
            show_default=True,
            help="What happens to longer rows.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def chosen_layers(layers: tuple[int, ...] | None, drafter: Path | None) -> tuple[int, ...]:
    """The layers, given as a list or by a drafter.

    Raises:
        SpecError: both or neither is given.
    """
    if (layers is None) == (drafter is None):
        raise SpecError("give either --layers, such as --layers 1,16,31, or --drafter with its config.json")
    if layers is not None:
        return layers
    from layertap.target_info import drafter_layer_ids

    assert drafter is not None
    return drafter_layer_ids(drafter)


def empty_table(*columns: str) -> Table:
    """An empty table; only its last column is folded where the terminal is too narrow."""
    *others, last = columns
    table = Table(*(Column(name, no_wrap=True) for name in others), box=box.SIMPLE, show_header=any(columns))
    table.add_column(last, overflow="fold")
    return table
