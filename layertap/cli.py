"""The `layertap` command.

Here are the commands that need no scheduler; those that look after a root are in
`layertap.upkeep`. Further ones are found through the entry points of the group `layertap.commands`;
those of this project lie in `deployments/commands.py`.
"""

import json
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from rich import box
from rich.console import Console
from rich.table import Column, Table

from layertap import __version__, upkeep
from layertap.errors import InputError, LayertapError, SpecError
from layertap.spec import DTypeName, LastHiddenState

if TYPE_CHECKING:
    from layertap.catalog import Catalog
    from layertap.coordinator import Preview
    from layertap.plan import Plan
    from layertap.trainers.export import Export

COMMANDS_GROUP = "layertap.commands"
MAX_REASONS = 10
TRAINERS = ("speculators", "specforge", "modelopt", "automodel", "deepspec")


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


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="layertap")
def main() -> None:
    """Tap layers of a target language model over a tokenised dataset, and store the hidden states.

    A first run: `prepare` turns chats into tokens, `plan` says what an extraction will cost, `up` starts
    a Prefect server, an object store and workers on this machine, `run` extracts.
    """


@main.command()
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


@main.command()
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
    from layertap.coordinator import Preview, RunSettings
    from layertap.dataset import Columns
    from layertap.plan import PlanSettings

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
    table = _table("", "")
    for name, value in preview.table(made):
        table.add_row(name, value)
    Console(highlight=False).print(table)
    _show_refused(preview.scan.refused)


def _show_refused(refused: Mapping[int, str]) -> None:
    for reason in islice(refused.values(), MAX_REASONS):
        click.echo(f"refused: {reason}")
    if len(refused) > MAX_REASONS:
        click.echo(f"… and {len(refused) - MAX_REASONS:,} more")


@main.command("fetch-target")
@click.argument("target", metavar="ID|FOLDER")
@click.option("--revision", help="Hub revision of the target.")
def fetch_target(target: str, revision: str | None) -> None:
    """Bring a target from the hub onto this host, once, for all its lanes.

    Only what lanes load is fetched. Called again it fetches what is missing; a folder is checked.
    """
    from layertap.target_info import fetch

    info = fetch(target, revision=revision)
    click.echo(f"{info.identity} is on this host: {info.num_hidden_layers} layers of {info.hidden_size}")


@main.command()
@click.argument("place", metavar="ROOT|FILE")
@click.option("--version", "number", type=click.IntRange(min=1), help="Show this version.")
@click.option("--plan", "plan_id", help="Show a shard of this plan.")
@click.option("--shard", type=click.IntRange(min=0), default=0, show_default=True, help="Which one.")
@state_option
def inspect(place: str, number: int | None, plan_id: str | None, shard: int, state: Path | None) -> None:
    """Show a batch file, a shard or a version.

    FILE is a .safetensors file of a root; ROOT a folder or s3://bucket/prefix, with --version or --plan.
    """
    from layertap.catalog import Catalog
    from layertap.inspection import inspect_batch, inspect_shard, inspect_version
    from layertap.object_server import open_root

    if place.endswith(".safetensors"):
        folder, _, name = place.rpartition("/")
        facts = inspect_batch(open_root(folder or ".", state), name)
    elif number is not None:
        facts = inspect_version(open_root(place, state), number)
    elif plan_id is not None:
        facts = inspect_shard(Catalog(open_root(place, state)), plan_id, shard)
    else:
        raise InputError(
            "say what to show: a .safetensors file, or a root with --version or --plan and --shard"
        )
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name:<{width}}  {value}")


@main.command()
@click.argument("root")
@click.option("--plan", "plan_id", help="Show one plan, shard by shard.")
@state_option
def status(root: str, plan_id: str | None, state: Path | None) -> None:
    """Show the plans and versions that ROOT holds.

    ROOT is a folder or s3://bucket/prefix, with AWS's usual environment (AWS_ENDPOINT_URL for other stores).
    """
    from layertap.catalog import Catalog
    from layertap.object_server import open_root

    catalog = Catalog(open_root(root, state))
    spec = catalog.root().spec
    click.echo(f"layers {', '.join(map(str, spec.layer_ids))} of {spec.target_identity}, {spec.dtype}")
    if plan_id:
        if plan_id not in catalog.plans():
            there = ", ".join(catalog.plans()) or "none yet"
            raise InputError(f"{root} has no plan {plan_id!r}; plans there: {there}")
        _show_shards(catalog, plan_id)
        _show_lanes(catalog, plan_id)
    else:
        _show_plans(catalog)
        _show_versions(catalog)


@main.command("vocab-map")
@click.argument("source", metavar="ROOT|DATASET")
@click.option("--draft-vocab", type=click.IntRange(min=1), required=True, help="Tokens of the drafter.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="A .pt file for SpecForge, or a folder for speculators (d2t-N.npy and t2d-N.npy).",
)
@click.option("--target", metavar="ID|FOLDER", help="Target of a DATASET; a ROOT has its own.")
@click.option("--revision", help="Hub revision of the target.")
@click.option("--max-length", type=int, default=4096, show_default=True, help="Tokens of a DATASET's rows.")
@click.option("--version", type=int, help="Version of a ROOT; by default its newest complete one.")
def vocab_map(source: str, draft_vocab: int, out: Path, **options: Any) -> None:
    """Choose the vocabulary of a drafter: the most frequent supervised tokens, and all special ones.

    Writes d2t (offsets: a draft token's target id is its own number plus d2t) and t2d (a mask over the
    target's vocabulary), as EAGLE-3 trainers read them.
    """
    from layertap.vocab_map import VocabMap, count_supervised

    counts, special = count_supervised(source, **options)
    made = VocabMap.choose(counts, draft_vocab=draft_vocab, kept=special)
    for file in made.save(out):
        click.echo(file)
    share = made.num_covered / max(made.num_supervised, 1)
    click.echo(
        f"{draft_vocab:,} of {len(counts):,} tokens, {len(special):,} of them special, cover {share:.2%} of "
        f"{made.num_supervised:,} supervised tokens"
    )


@main.command("check-served")
@click.argument("root")
@click.option("--endpoint", required=True, metavar="URL", help="vLLM or SGLang, such as http://host:8000/v1.")
@click.option("--model", help="Name of the served model, where there are several.")
@click.option("--rows", "num_rows", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--version", type=int, help="Which version; by default the newest complete one.")
def check_served(root: str, endpoint: str, **options: Any) -> None:
    """Compare the states in ROOT with the model that is served.

    Asks the server for the log probabilities of stored rows' tokens and compares them with those that the
    stored last hidden states give. Below 95 % agreement on the most probable supervised token it fails and
    names suspects. The result is recorded beside the version. The key of a server that asks for one is read
    from OPENAI_API_KEY.
    """
    from layertap.served import check_served
    from layertap.store import Store

    click.echo(check_served(Store.open(root), endpoint, **options))


def _show_plans(catalog: "Catalog") -> None:
    from layertap.watch import Watch

    table = _table("plan", "rows", "tokens", "done", "shards")
    for plan_id in catalog.plans():
        seen = Watch(catalog, catalog.plan(plan_id)).poll()
        shards = ", ".join(f"{count:,} {state}" for state, count in sorted(seen.shards_by_state.items()))
        table.add_row(plan_id, f"{seen.num_rows:,}", f"{seen.num_tokens:,}", f"{seen.percent:.1f}%", shards)
    Console(highlight=False).print(table)


def _show_lanes(catalog: "Catalog", plan_id: str) -> None:
    from layertap.lane_record import lane_records

    table = _table("lane", "tokens", "tokens/s", "what holds it up, and its GPU")
    for record in lane_records(catalog.store, plan_id):
        told = f"{record.bottleneck}; {record.gpu_in_words}"
        table.add_row(record.lane, f"{record.num_tokens:,}", f"{record.tokens_per_s:,.0f}", told)
    if table.rows:
        Console(highlight=False).print(table)


def _show_versions(catalog: "Catalog") -> None:
    from layertap.fidelity import NOT_CHECKED, latest
    from layertap.versions import Versions

    versions = Versions(catalog.store)
    table = _table("version", "rows", "stored", "tokens", "complete", "published")
    for version in map(versions.get, versions.numbers()):
        counts = [f"{n:,}" for n in (version.num_rows, version.num_stored, version.num_tokens)]
        is_complete = "yes" if version.complete else "no"
        table.add_row(str(version.number), *counts, is_complete, version.created_at)
    Console(highlight=False).print(table)
    for number in versions.numbers():
        click.echo(f"version {number}, served fidelity: {latest(catalog.store, number) or NOT_CHECKED}")


def _show_shards(catalog: "Catalog", plan_id: str) -> None:
    from layertap.watch import Watch

    table = _table("shard", "state", "claims", "failures", "rows", "tokens", "lane")
    for row in Watch(catalog, catalog.plan(plan_id)).poll().shards:
        done = [f"{row[f'{what} done']:,} of {row[what]:,}" for what in ("rows", "tokens")]
        cells = [row["shard"], row["state"], row["claims"], row["failures"], *done, row["lane"]]
        table.add_row(*map(str, cells))
    Console(highlight=False).print(table)


@main.command()
@click.argument("root")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--to", "trainer", type=click.Choice(TRAINERS), required=True, help="Whose files to write.")
@click.option("--version", type=int, help="Version of the root; by default the newest complete one.")
@click.option(
    "--algorithm", type=click.Choice(["eagle3", "dflash", "domino", "dspark"]), help="Needed for SpecForge."
)
@click.option("--seq-length", type=click.IntRange(min=1), help="Needed for Automodel: tokens of every row.")
@click.option(
    "--target-name", help="Needed for Automodel and DeepSpec: the target as the training config names it."
)
@click.option("--tokens-only", is_flag=True, help="For speculators: states are read from the root.")
def export(root: str, out: Path, trainer: str, version: int | None, **options: Any) -> None:
    """Write the stored rows of ROOT as files of a trainer into the folder OUT.

    Trainers that can read the root directly need no export: see docs/trainers.md. It says beforehand how much
    is written; killed and started again, it writes what is missing. OUT/target is a copy of the target's
    config, tokenizer, embedding, head and final norm.
    """
    from layertap.trainers.choose import layout_for
    from layertap.trainers.export import Export
    from layertap.trainers.rows import open_rows

    layout = layout_for(trainer, **options)
    rows = open_rows(root, layout.needs, version=version)
    planned = Export.plan(rows, layout, out, settings={"trainer": trainer, **options})
    _say_export(planned)
    planned.run()
    click.echo(f"written: {out}")


def _say_export(planned: "Export") -> None:
    rows, num_files = planned.rows, len(planned.files)
    click.echo(
        f"{len(rows):,} rows of version {rows.states.version.number} in {num_files:,} files, about "
        f"{planned.num_bytes:,} bytes; {num_files - len(planned.missing):,} files are there already"
    )
    if rows.num_left_out:
        click.echo(
            f"{rows.num_left_out:,} rows are left out: {rows.needs.trainer} refuses rows without two "
            "supervised tokens in succession"
        )


@main.command()
@click.argument("names", nargs=-1, type=click.Choice(["writes", "engine", "planning"]))
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to write, on the disk to be measured; some 15 GB [default: the system's temporary folder].",
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
    """Measure layertap on this machine, all of it or the benchmarks of NAMES, in about five minutes.

    Each is a ratio of two things taken in turns: `writes` against a file a sample, on a folder and on the
    embedded S3 server; `engine`, around a target that costs nothing, against a plain write; `planning` of
    913,786 rows against a hash.
    """
    from layertap.bench.command import BENCHMARKS, run

    run(names or list(BENCHMARKS), folder, out)


def _table(*columns: str) -> Table:
    """An empty table; only its last column is folded where the terminal is too narrow."""
    *others, last = columns
    table = Table(*(Column(name, no_wrap=True) for name in others), box=box.SIMPLE, show_header=any(columns))
    table.add_column(last, overflow="fold")
    return table


for command in (upkeep.verify, upkeep.void, upkeep.gc, upkeep.prune):
    main.add_command(command)


if __name__ == "__main__":
    main()
