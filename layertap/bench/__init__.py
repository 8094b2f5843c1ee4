"""Benchmarks of layertap on this machine: each a ratio of two things measured in one run, with its goal."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One ratio, what it was made of, and what it should be."""

    name: str
    layertap: float
    against: float

    unit: str
    """Of `layertap` and `against`."""

    against_what: str
    ratio: float

    at_least: float | None = None
    at_most: float | None = None
    """The goal of the ratio, if it has one."""

    details: dict[str, Any] = field(default_factory=dict)

    @property
    def goal(self) -> str:
        """`≥ 3.2`, `≤ 1.5`, or nothing."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}" if self.at_most is not None else ""

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None if there is none."""
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return self.ratio <= self.at_most if self.at_most is not None else None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, with the goal in words."""
        return {**vars(self), "goal": self.goal, "is_met": self.is_met}


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(num_trials: int, *works: Callable[[], float]) -> list[list[float]]:
    """What each of several measurements gives, in turns: what else the machine does hits all of them."""
    rounds = [[work() for work in works] for _ in range(num_trials)]
    return [list(values) for values in zip(*rounds, strict=True)]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the trials' ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.machine(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
