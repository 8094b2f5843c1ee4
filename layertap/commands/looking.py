"""The commands that show what a root holds: `inspect`, `status`."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from layertap.commands.options import empty_table, state_option
from layertap.errors import InputError, StoreError, is_store_wide

if TYPE_CHECKING:
    from layertap.catalog import Catalog


@click.command()
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


@click.command()
@click.argument("root")
@click.option("--plan", "plan_id", help="Show one plan, shard by shard.")
@state_option
def status(root: str, plan_id: str | None, state: Path | None) -> None:
    """Show the plans and versions that ROOT holds.

    ROOT is a folder or s3://bucket/prefix, with AWS's usual environment (AWS_ENDPOINT_URL for other stores).
    """
    from layertap.catalog import Catalog
    from layertap.object_server import open_root
    from layertap.store_check import BRIEF

    store = open_root(root, state).with_retry(BRIEF)
    try:
        _show_root(Catalog(store), plan_id)
    except StoreError as error:
        if not is_store_wide(error):
            raise
        raise StoreError(
            f"the store doesn't answer: {error}. Runs on it wait, as their pages in the UI say, "
            "and go on when it does: see that it is up and lets this host in, then ask again"
        ) from error


def _show_root(catalog: "Catalog", plan_id: str | None) -> None:
    spec = catalog.root().spec
    click.echo(f"layers {', '.join(map(str, spec.layer_ids))} of {spec.target_identity}, {spec.dtype}")
    if plan_id:
        if plan_id not in catalog.plans():
            there = ", ".join(catalog.plans()) or "none yet"
            raise InputError(f"{catalog.store.uri} has no plan {plan_id!r}; plans there: {there}")
        _show_shards(catalog, plan_id)
        _show_lanes(catalog, plan_id)
    else:
        _show_plans(catalog)
        _show_versions(catalog)


def _show_plans(catalog: "Catalog") -> None:
    from layertap.lane_record import bottleneck_of, lane_records
    from layertap.watch import Watch

    table = empty_table("plan", "rows", "tokens", "done", "shards")
    plan_ids = catalog.plans()
    for plan_id in plan_ids:
        plan = catalog.find_plan(plan_id)
        if plan is None:
            counts = _counted(Counter(map(str, catalog.states(plan_id).values()))) or "none begun"
            table.add_row(plan_id, "", "", "", f"of another schema or damaged; {counts}")
            continue
        seen = Watch(catalog, plan).poll()
        shards = _counted(seen.shards_by_state)
        table.add_row(plan_id, f"{seen.num_rows:,}", f"{seen.num_tokens:,}", f"{seen.percent:.1f}%", shards)
    Console(highlight=False).print(table)
    for plan_id in plan_ids:
        if records := lane_records(catalog.store, plan_id):
            click.echo(f"plan {plan_id}, lanes of its last run: {bottleneck_of(records)}")


def _counted(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))


def _show_lanes(catalog: "Catalog", plan_id: str) -> None:
    from layertap.lane_record import lane_records

    table = empty_table("lane", "tokens", "tokens/s", "what holds it up, its GPU, and what computes")
    for record in lane_records(catalog.store, plan_id):
        told = f"{record.bottleneck}; {record.gpu_in_words}; {record.computed_by}"
        table.add_row(record.lane, f"{record.num_tokens:,}", f"{record.tokens_per_s:,.0f}", told)
    if table.rows:
        Console(highlight=False).print(table)


def _show_versions(catalog: "Catalog") -> None:
    from layertap.fidelity import NOT_CHECKED, latest
    from layertap.versions import Versions

    versions = Versions(catalog.store)
    table = empty_table("version", "rows", "stored", "tokens", "complete", "published")
    for version in filter(None, map(versions.find_whole, versions.numbers())):
        counts = [f"{n:,}" for n in (version.num_rows, version.num_stored, version.num_tokens)]
        is_complete = "yes" if version.complete else "no"
        table.add_row(str(version.number), *counts, is_complete, version.created_at)
    Console(highlight=False).print(table)
    for number in versions.numbers():
        click.echo(f"version {number}, served fidelity: {latest(catalog.store, number) or NOT_CHECKED}")


def _show_shards(catalog: "Catalog", plan_id: str) -> None:
    from layertap.watch import Watch

    columns = ("shard", "state", "claims", "failures", "rows", "tokens", "tokens/s", "lane")
    table = empty_table(*columns)
    for row in Watch(catalog, catalog.plan(plan_id)).poll().shards:
        done = {what: f"{row[f'{what} done']:,} of {row[what]:,}" for what in ("rows", "tokens")}
        cells = [{**row, **done}[column] for column in columns]
        table.add_row(*map(str, cells))
    Console(highlight=False).print(table)
