"""The commands between a root and a trainer: `vocab-map`, `check-served`, `export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layertap.commands.options import state_option

if TYPE_CHECKING:
    from layertap.trainers.export import Export

TRAINERS = ("speculators", "specforge", "modelopt", "automodel", "deepspec")


@click.command("vocab-map")
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
@state_option
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


@click.command("check-served")
@click.argument("root")
@click.option("--endpoint", required=True, metavar="URL", help="vLLM or SGLang, such as http://host:8000/v1.")
@click.option("--model", help="Name of the served model, where there are several.")
@click.option("--rows", "num_rows", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--version", type=int, help="Which version; by default the newest complete one.")
@state_option
def check_served(root: str, endpoint: str, state: Path | None, **options: Any) -> None:
    """Compare the states in ROOT with the model that is served.

    Asks the server for the log probabilities of stored rows' tokens and compares them with those that the
    stored last hidden states give. Below 95 % agreement on the most probable supervised token it fails and
    names suspects. The result is recorded beside the version. The key of a server that asks for one is read
    from OPENAI_API_KEY.
    """
    from layertap.object_server import open_root
    from layertap.served import check_served

    click.echo(check_served(open_root(root, state), endpoint, **options))


@click.command()
@click.argument("root")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--to", "trainer", type=click.Choice(TRAINERS), required=True, help="Whose files to write.")
@click.option("--version", type=int, help="Version of the root; by default the newest complete one.")
@click.option(
    "--algorithm", type=click.Choice(["eagle3", "dflash", "domino", "dspark"]), help="Needed for SpecForge."
)
@click.option(
    "--seq-length",
    type=click.IntRange(min=1),
    help="Needed for Automodel: tokens of every row. For SpecForge: where its max_length cuts rows.",
)
@click.option(
    "--target-name", help="Needed for Automodel and DeepSpec: the target as the training config names it."
)
@click.option("--tokens-only", is_flag=True, help="For speculators: states are read from the root.")
@state_option
def export(
    root: str, out: Path, trainer: str, version: int | None, state: Path | None, **options: Any
) -> None:
    """Write the stored rows of ROOT as files of a trainer into the folder OUT.

    Trainers that can read the root directly need no export: see docs/trainers.md. It says beforehand how much
    is written; killed and started again, it writes what is missing. OUT/target is a copy of the target's
    config, tokenizer, embedding, head and final norm.
    """
    from layertap.object_server import open_root
    from layertap.trainers.choose import layout_for
    from layertap.trainers.export import Export
    from layertap.trainers.rows import open_rows

    layout = layout_for(trainer, **options)
    rows = open_rows(open_root(root, state), layout.needs, version=version)
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
        where = f" among their first {rows.needs.max_tokens}" if rows.needs.max_tokens else ""
        click.echo(
            f"{rows.num_left_out:,} rows are left out: {rows.needs.trainer} refuses rows without two "
            f"supervised tokens in succession{where}"
        )
