"""The figures of the engine on GPUs as ratios, each with its goal."""

from collections.abc import Mapping
from typing import Any

from layertap.bench import Measured

Figures = Mapping[str, Any]

OF_EACH = 0.975
"""What several engines at once have to make, of so many times one."""


def ratios(found: Figures) -> list[Measured]:
    """Ratios of what `gpu_engine` found; on several GPUs of all against one, and those of the first."""
    if "gpus" in found:
        return [_together(found), *ratios(found["gpus"][0])]
    engine = found.get("alone") or found["engine"]  # while no other GPU worked
    one_row = next((name for name in found if name.startswith("eager_1x")), "")
    races = [
        ("engine", engine, "eager_alone", "forward alone of the plan's batches, eager", 1.3),
        ("engine", engine, "compiled_alone", "forward alone of the plan's batches, compiled", None),
        ("engine", engine, one_row, "forward alone of a row at a time, eager", None),
        ("forward, compiled", found.get("compiled_alone"), "eager_alone", "the same batches, eager", None),
    ]
    rates = [
        _rates(name, ours, found[other], what, goal)
        for name, ours, other, what, goal in races
        if other in found and ours
    ]
    return [*rates, _share_of_ceiling(found, engine), _outside_forward(engine)]


def _rates(name: str, ours: Figures, theirs: Figures, what: str, at_least: float | None) -> Measured:
    return Measured(
        name=name,
        layertap=ours["tokens_per_s"],
        against=theirs["tokens_per_s"],
        unit="tokens/s",
        against_what=what,
        ratio=ours["tokens_per_s"] / theirs["tokens_per_s"],
        at_least=at_least,
    )


def _share_of_ceiling(found: Figures, engine: Figures) -> Measured:
    flops_per_s = engine["tokens_per_s"] * found["flops_per_token"]
    return Measured(
        name="engine, share of the ceiling",
        layertap=flops_per_s / 1e12,
        against=flops_per_s / found["share_of_ceiling"] / 1e12,
        unit="TFLOP/s",
        against_what="the matrix product alone, the better of before and after",
        ratio=found["share_of_ceiling"],
    )


def _outside_forward(engine: Figures) -> Measured:
    return Measured(
        name="engine, seconds outside the forward pass",
        layertap=engine["outside_forward_share"] * engine["elapsed_s"],
        against=engine["elapsed_s"],
        unit="s",
        against_what="all seconds of the stretch",
        ratio=engine["outside_forward_share"],
        at_most=0.02,
    )


def _together(found: Figures) -> Measured:
    return Measured(
        name=f"{len(found['together'])} engines at once",
        layertap=sum(found["together"]),
        against=sum(found["alone"]) / len(found["alone"]),
        unit="tokens/s",
        against_what="one alone, the mean of each",
        ratio=found["ratio"],
        at_least=OF_EACH * len(found["together"]),
    )
