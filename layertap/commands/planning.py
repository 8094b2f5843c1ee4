"""The commands before a run: `prepare`, `plan`, `fetch-target`."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from layertap.commands.options import NameValue, chosen_layers, empty_table, state_option, target_options

if TYPE_CHECKING:
    from layertap.plan import Plan
    from layertap.preview import Preview

MAX_REASONS = 10


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--tokenizer", required=True, metavar="ID|FOLDER", help="Tokenizer of the target.")
@click.option("--revision", help="Hub revision of the tokenizer.")
@click.option(
    "--template",
    metavar="FILE|chatml",
    help="Chat template that marks the assistant's turns, instead of the tokenizer's; chatml is shipped.",
)
@click.option(
    "--template-argument",
    "template_arguments",
    type=NameValue(),
    multiple=True,
    help="Argument of the template, such as enable_thinking=false; may be repeated.",
)
@click.option("--max-length", type=click.IntRange(min=1), help="Tokens kept of a chat; all by default.")
@click.option("--responses", default="unknown", show_default=True, help="Who wrote the responses.")
def prepare(
    source: Path,
    out: Path,
    template_arguments: tuple[tuple[str, Any], ...],
    **options: Any,
) -> None:
    """Tokenise the chats of SOURCE into the dataset folder OUT.

    SOURCE is JSONL: one {"messages": [{"role": …, "content": …}, …], "id": …} a line. OUT holds input_ids,
    loss_mask (1 on the assistant's tokens) and id, in the layout of datasets.save_to_disk.
    """
    from layertap.prepare import prepare_chats

    made = prepare_chats(source, out, template_arguments=dict(template_arguments), **options)
    click.echo(
        f"{made.num_rows:,} rows in {made.path}: {made.num_tokens:,} tokens, {made.num_supervised:,} of them "
        f"supervised; {made.num_truncated:,} rows truncated, {len(made.refused):,} lines refused"
    )
    _show_refused(made.refused)


@click.command()
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@target_options
@click.option("--split", help="Split of a dictionary of datasets.")
@click.option("--input-ids-column", default="input_ids", show_default=True)
@click.option("--loss-mask-column", default="loss_mask", show_default=True)
@click.option("--id-column", default="id", show_default=True)
@click.option(
    "--max-batch-tokens",
    type=int,
    default=8192,
    show_default=True,
    help="Rows of a batch times its longest row.",
)
@click.option("--shard-tokens", type=int, default=2_000_000, show_default=True, help="Tokens of a shard.")
@click.option("--root", help="Leave out what this root holds already: a folder or s3://bucket/prefix.")
@state_option
def plan(
    dataset: Path,
    root: str | None,
    state: Path | None,
    layers: tuple[int, ...] | None,
    drafter: Path | None,
    input_ids_column: str,
    loss_mask_column: str,
    id_column: str,
    max_batch_tokens: int,
    shard_tokens: int,
    **options: Any,
) -> None:
    """Say what an extraction of DATASET will cost.

    Checks every row and the target's config. DATASET is a folder of datasets.save_to_disk, a Parquet file or
    a folder of them. Nothing is written, and neither a store nor a GPU is needed.
    """
    from layertap.dataset import Columns
    from layertap.plan import PlanSettings
    from layertap.preview import Preview, RunSettings

    settings = RunSettings(
        dataset=str(dataset),
        layer_ids=chosen_layers(layers, drafter),
        columns=Columns(input_ids=input_ids_column, loss_mask=loss_mask_column, row_id=id_column),
        plan=PlanSettings(max_batch_tokens=max_batch_tokens, shard_tokens=shard_tokens),
        max_refused_share=1.0,  # whoever looks at a plan wants to see all of it, the refused rows above all
        **options,
    )
    preview = Preview.make(settings)
    _show_plan(preview, preview.plan(_rows_missing_in(root, state, preview) if root else None))


def _rows_missing_in(root: str, state: Path | None, preview: "Preview") -> Any:
    from layertap.catalog import Catalog
    from layertap.object_server import open_root

    return preview.missing_in(Catalog(open_root(root, state)))


def _show_plan(preview: "Preview", made: "Plan") -> None:
    table = empty_table("", "")
    for name, value in preview.table(made):
        table.add_row(name, value)
    Console(highlight=False).print(table)
    _show_refused(preview.scan.refused)


def _show_refused(refused: Mapping[int, str]) -> None:
    for reason in islice(refused.values(), MAX_REASONS):
        click.echo(f"refused: {reason}")
    if len(refused) > MAX_REASONS:
        click.echo(f"… and {len(refused) - MAX_REASONS:,} more")


@click.command("fetch-target")
@click.argument("target", metavar="ID|FOLDER")
@click.option("--revision", help="Hub revision of the target.")
def fetch_target(target: str, revision: str | None) -> None:
    """Bring a target from the hub onto this host, once, for all its lanes.

    Only what lanes load is fetched. Called again it fetches what is missing; a folder is checked.
    """
    from layertap.target_info import fetch

    info = fetch(target, revision=revision)
    click.echo(f"{info.identity} is on this host: {info.num_hidden_layers} layers of {info.hidden_size}")
