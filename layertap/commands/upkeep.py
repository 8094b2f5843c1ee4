"""The commands that look after a root: `verify`, `void`, `gc`, `prune`."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layertap.commands.options import state_option
from layertap.errors import InputError, IntegrityError

if TYPE_CHECKING:
    from layertap.catalog import Catalog
    from layertap.garbage import Garbage

root_argument = click.argument("root")


@click.command()
@root_argument
@click.option("--rows", type=click.IntRange(min=1), default=1000, show_default=True, help="Rows to read.")
@click.option("--all", "all_rows", is_flag=True, help="Read every row, and every file whole.")
@click.option("--target", metavar="ID|FOLDER", help="Compute some of the rows again on this target.")
@click.option("--revision", help="Hub revision of the target.")
@click.option(
    "--recompute", type=click.IntRange(min=1), default=8, show_default=True, help="Rows to compute again."
)
@state_option
def verify(
    root: str,
    state: Path | None,
    rows: int,
    all_rows: bool,
    target: str | None,
    revision: str | None,
    recompute: int,
) -> None:
    """Read ROOT back and say what isn't as it was written.

    Every record and every file of the target is checked; of a sample of rows their files' sizes and headers,
    their checksums and extraction keys, and that the states are finite and not the same everywhere. With
    --all the checksums of whole files are checked too. The exit code is 1 if anything is wrong.
    """
    from layertap.object_server import open_root
    from layertap.verify import verify_root

    report = verify_root(
        open_root(root, state),
        num_rows=None if all_rows else rows,
        target=target,
        revision=revision,
        num_recomputed=recompute,
    )
    click.echo(str(report))
    for finding in report.findings:
        click.echo(f"{finding}")
    for way in report.ways_out():
        click.echo(way)
    if report.findings:
        raise SystemExit(1)


@click.command()
@root_argument
@click.argument("plan_id", metavar="PLAN")
@click.argument("shards", metavar="[SHARD]...", type=click.IntRange(min=0), nargs=-1)
@click.option("--all", "all_shards", is_flag=True, help="Every shard of the plan.")
@click.option("--reason", default="withdrawn by hand", show_default=True)
@click.option("--withdraw", is_flag=True, help="Withdraw them; without, it is only said what they hold.")
@state_option
def void(
    root: str,
    state: Path | None,
    plan_id: str,
    shards: tuple[int, ...],
    all_shards: bool,
    reason: str,
    withdraw: bool,
) -> None:
    """Say what shards of a PLAN of ROOT hold, or withdraw them: the next run computes their rows again.

    Their files stay until `gc`; versions that name them keep them.
    """
    from layertap.catalog import Catalog
    from layertap.object_server import open_root
    from layertap.shard_state import ShardState

    catalog = Catalog(open_root(root, state))
    catalog.root()
    states = catalog.states(plan_id)
    chosen = _chosen(catalog, plan_id, shards, all_shards)
    left = [shard for shard in chosen if states.get(shard) != ShardState.VOID]
    if gone := len(chosen) - len(left):
        click.echo(f"{gone:,} shards of plan {plan_id} are withdrawn already")
    click.echo(_told(catalog, plan_id, left, [k for k in left if states.get(k) == ShardState.COMMITTED]))
    if not withdraw or not left:
        return click.echo("Nothing was withdrawn" + (": add --withdraw to do it." if left else "."))
    for shard in left:
        catalog.void(plan_id, shard, reason=reason)
        click.echo(f"withdrawn: shard {shard} of plan {plan_id}")
    click.echo("Start the run again to compute their rows anew.")


def _told(catalog: "Catalog", plan_id: str, shards: list[int], committed: list[int]) -> str:
    """What would have to be computed again."""
    from layertap.background import at_once

    stored = at_once(lambda shard: _num_stored(catalog, plan_id, shard), committed).values()
    rotten = f", and {count} whose records are damaged" if (count := [*stored].count(None)) else ""
    return (
        f"{len(shards):,} shards of plan {plan_id}: {len(committed):,} are committed, "
        f"with {sum(filter(None, stored)):,} rows stored{rotten}"
    )


def _num_stored(catalog: "Catalog", plan_id: str, shard: int) -> int | None:
    with suppress(IntegrityError):
        return catalog.outcome(plan_id, shard).num_rows
    return None


def _chosen(catalog: "Catalog", plan_id: str, shards: tuple[int, ...], all_shards: bool) -> list[int]:
    from layertap.catalog import refuse_unknown

    there = catalog.shards(plan_id)
    if not there:
        plans = ", ".join(catalog.store.folders("plans")) or "none"
        raise InputError(f"{catalog.store.uri} has no plan {plan_id!r}; plans there: {plans}")
    if all_shards == bool(shards):
        raise InputError("give either the shards to withdraw, or --all")
    refuse_unknown(plan_id, shards, there)
    return there if all_shards else sorted(set(shards))


delete_option = click.option("--delete", is_flag=True, help="Delete it; without, it is only listed.")


@click.command()
@root_argument
@click.option(
    "--older-than",
    "hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    help="Hours since the last change, so that nothing goes that is being written.",
)
@delete_option
@state_option
def gc(root: str, state: Path | None, hours: float, delete: bool) -> None:
    """List what crashed lanes left in ROOT and nothing names any more, or delete it.

    Files of tries that were not committed, once their shard has an outcome or is withdrawn; rows of withdrawn
    shards whose plan was never completed; temporary files; multipart uploads that nobody ended. What an
    outcome or a version names stays.
    """
    from datetime import timedelta

    from layertap.garbage import find_garbage
    from layertap.object_server import open_root

    _show(find_garbage(open_root(root, state), older_than=timedelta(hours=hours)), delete)


@click.command()
@root_argument
@click.option("--keep-versions", "num_kept", type=click.IntRange(min=1), required=True, help="How many stay.")
@delete_option
@state_option
def prune(root: str, state: Path | None, num_kept: int, delete: bool) -> None:
    """List the versions of ROOT older than the newest few, with their tables and checks, or delete them.

    The newest complete one stays too. Hidden states stay where an outcome names them; `gc` takes the others.
    """
    from layertap.garbage import old_versions
    from layertap.object_server import open_root

    _show(old_versions(open_root(root, state), num_kept=num_kept), delete)


def _show(garbage: "Garbage", delete: bool) -> None:
    for path, why in garbage.reasons.items():
        click.echo(f"{path}: {why}")
    for upload in garbage.uploads:
        click.echo(f"{upload.path}: a multipart upload that nobody ended")
    click.echo(str(garbage))
    try:
        if delete:
            garbage.delete()
            click.echo("deleted")
    finally:
        for note in garbage.notes:
            click.echo(note)
    if not delete and (garbage.reasons or garbage.uploads):
        click.echo("Nothing was deleted: add --delete to do it.")
