"""Runs the benchmarks and shows them: `layertap bench`."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from layertap.bench import Measured, machine


def _writes(folder: Path) -> list[Measured]:
    from layertap.bench.writes import measure

    return measure(folder)


def _engine(folder: Path) -> list[Measured]:
    from layertap.bench.engine import measure

    return measure(folder)


def _planning(folder: Path) -> list[Measured]:
    from layertap.bench.planning import measure

    return measure(folder)


def _reader(folder: Path) -> list[Measured]:
    from layertap.bench.reads import measure

    return measure(folder)


BENCHMARKS: Mapping[str, Callable[[Path], list[Measured]]] = {
    "writes": _writes,
    "engine": _engine,
    "planning": _planning,
    "reader": _reader,
}

FORWARD = (
    f"forward on the GPU: python benchmarks/gpu_engine.py in a clone, {torch.cuda.get_device_name()}"
    if torch.cuda.is_available()
    else "forward on the GPU: not run, it needs a GPU and this machine has none"
)


def run(names: Sequence[str], folder: Path | None, out: Path) -> list[Measured]:
    """Run the benchmarks of these names in a temporary folder, print their table and write their JSON."""
    before, measured = machine(), list[Measured]()
    with tempfile.TemporaryDirectory(prefix="layertap-bench-", dir=folder) as scratch:
        for name in names:
            Console(stderr=True).print(f"{name} …")
            measured += BENCHMARKS[name](Path(scratch))
    after = machine()
    _show(measured, before, after)
    report: dict[str, Any] = {"before": before, "after": after, "forward": FORWARD}
    out.write_text(json.dumps({**report, "measured": [one.to_dict() for one in measured]}, indent=1))
    return measured


def _show(measured: Sequence[Measured], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    table = Table("benchmark", "layertap", "against", "what", "ratio", "goal", "", box=box.SIMPLE)
    for one in measured:
        met = {True: "met", False: "missed", None: ""}[one.is_met]
        figures = [f"{value:,.2f} {one.unit}" for value in (one.layertap, one.against)]
        table.add_row(one.name, *figures, one.against_what, f"{one.ratio:.2f}", one.goal, met)
    console = Console(highlight=False)
    console.print(table)
    load = [" ".join(f"{x:.1f}" for x in seen["load_average"]) for seen in (before, after)]
    console.print(
        f"{before['cpu']}, {before['num_cores']} cores, torch {before['torch']}; "
        f"load average {load[0]} before, {load[1]} after"
    )
    console.print(FORWARD)
