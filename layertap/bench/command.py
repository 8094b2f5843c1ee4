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
from layertap.errors import InputError


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


def _forward(folder: Path) -> list[Measured]:
    from layertap.bench.forward import measure

    if not torch.cuda.is_available():
        raise InputError(FORWARD_NOT_RUN)
    return measure()


BENCHMARKS: Mapping[str, Callable[[Path], list[Measured]]] = {
    "writes": _writes,
    "engine": _engine,
    "planning": _planning,
    "reader": _reader,
    "forward": _forward,
}

FORWARD_NOT_RUN = "forward on the GPU: not run, it needs a GPU and this machine has none"


def run_all(folder: Path | None, out: Path) -> list[Measured]:
    """`run` all benchmarks for which this machine has what they need, and say which were left out."""
    has_gpu = torch.cuda.is_available()
    names = [name for name in BENCHMARKS if name != "forward" or has_gpu]
    return run(names, folder, out, not_run=[] if has_gpu else [FORWARD_NOT_RUN])


def run(names: Sequence[str], folder: Path | None, out: Path, not_run: Sequence[str] = ()) -> list[Measured]:
    """Run the benchmarks of these names in a temporary folder, print their table and write their JSON.

    Raises:
        InputError: one needs what this machine hasn't.
    """
    before, measured = machine(), list[Measured]()
    with tempfile.TemporaryDirectory(prefix="layertap-bench-", dir=folder) as scratch:
        for name in names:
            Console(stderr=True).print(f"{name} …")
            measured += BENCHMARKS[name](Path(scratch))
    after = machine()
    show(measured)
    _say(before, after, not_run)
    report: dict[str, Any] = {"before": before, "after": after, "not_run": not_run}
    out.write_text(json.dumps({**report, "measured": [one.to_dict() for one in measured]}, indent=1))
    return measured


def show(measured: Sequence[Measured]) -> None:
    """Print a table of ratios and their goals."""
    table = Table("benchmark", "layertap", "against", "what", "ratio", "goal", "", box=box.SIMPLE)
    for one in measured:
        met = {True: "met", False: "missed", None: ""}[one.is_met]
        figures = [f"{value:,.2f} {one.unit}" for value in (one.layertap, one.against)]
        table.add_row(one.name, *figures, one.against_what, f"{one.ratio:.2f}", one.goal, met)
    Console(highlight=False).print(table)


def _say(before: Mapping[str, Any], after: Mapping[str, Any], not_run: Sequence[str]) -> None:
    console = Console(highlight=False)
    load = [" ".join(f"{x:.1f}" for x in seen["load_average"]) for seen in (before, after)]
    console.print(f"{before['cpu']}, {before['num_cores']} cores, GPU: {before['gpu'] or 'none'}")
    console.print(f"torch {before['torch']}; load average {load[0]} before, {load[1]} after")
    for sentence in not_run:
        console.print(sentence)
