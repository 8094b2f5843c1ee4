"""What a lane tells of itself while it works: where its seconds go, how fast it is, how busy its GPU.

It lies in the store as `plans/<plan>/lanes/<lane>.json`, overwritten by the lane at each beat and once more
at its end. For people and plots; nothing is decided by it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from layertap.progress import bottleneck, format_bytes
from layertap.records import known_fields
from layertap.store import Store
from layertap.told import read_told


@dataclass(frozen=True, kw_only=True)
class LaneRecord:
    """One lane as it last told."""

    lane: str
    run: str
    host: str
    device: str
    opened_at: str
    """When its seconds began to count, before the target was loaded."""

    updated_at: str

    seconds: dict[str, float]
    """All its seconds, by what they went to."""

    num_tokens: int
    """Tokens extracted, committed or not."""

    samples: list[list[float]]
    """Seconds since the lane opened, tokens by then, and the most bytes of resident memory seen since the
    sample before; about 10 s apart at first."""

    gpu: dict[str, Any]
    """What `GpuMeter.summary` says."""

    environment: dict[str, Any]
    """What `Target.environment` says; empty in records of before it was kept."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the lane opened."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over the lane's whole life, its start included."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def peak_resident_bytes(self) -> int:
        """The largest resident memory sampled."""
        return int(max((sample[2] for sample in self.samples), default=0))

    @property
    def bottleneck(self) -> str:
        """What holds the lane up, as a sentence."""
        return bottleneck_of([self])

    @property
    def gpu_in_words(self) -> str:
        """The GPU's load and memory, or why they aren't known."""
        if "utilisation_percent" not in self.gpu:
            return str(self.gpu["note"])
        used, total = (format_bytes(self.gpu[name]) for name in ("peak_memory_bytes", "memory_bytes"))
        return f"GPU {self.gpu['utilisation_percent']:.0f} % busy, {used} of {total} used at most"

    @property
    def computed_by(self) -> str:
        """What computes: layers compiled or not, the attention, and each function that had a choice."""
        if not self.environment:
            return "not recorded"
        kernels = [f"{name} of {module}" for name, module in self.environment["kernels"].items()]
        layers = "compiled layers" if self.environment["compiled"] else "layers as they are, not compiled"
        return ", ".join([layers, f"attention {self.environment['attention']}", *kernels])

    def markdown(self) -> str:
        """The record for a person."""
        lines = [
            f"**{self.bottleneck[0].upper()}{self.bottleneck[1:]}.**",
            "",
            f"{self.num_tokens:,} tokens, {self.tokens_per_s:,.0f} a second from opening to now; "
            f"{self.gpu_in_words}; at most {format_bytes(self.peak_resident_bytes)} of this host's memory.",
            "",
            f"Computed by: {self.computed_by}.",
            "",
            "| seconds | spent on |",
            "| ---: | --- |",
        ]
        return "\n".join([*lines, *(f"| {spent_s:,.1f} | {on} |" for on, spent_s in self.seconds.items())])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; fields of newer minor formats are ignored."""
        return cls(**known_fields(cls, {"environment": {}, **values}))


def lane_records(store: Store, plan_id: str) -> list[LaneRecord]:
    """The records of all lanes that worked on a plan, in the order in which they opened.

    A damaged one is left out with a warning.
    """
    paths = [info.path for info in store.list(f"plans/{plan_id}/lanes") if info.path.endswith(".json")]
    records = filter(None, (read_told(store, path, LaneRecord.from_dict) for path in paths))
    return sorted(records, key=lambda record: (record.opened_at, record.lane))


def bottleneck_of(records: Sequence[LaneRecord]) -> str:
    """What holds up the lanes of the newest run among these, taken together, as a sentence."""
    lanes = [record for record in records if record.run == records[-1].run]
    seconds = sum((Counter(lane.seconds) for lane in lanes), Counter[str]())
    return bottleneck(seconds, device="CPU" if lanes[0].device.startswith("CPU") else "GPU")


def lane_path(plan_id: str, lane: str) -> str:
    """Where a lane's record lies."""
    return f"plans/{plan_id}/lanes/{lane}.json"
