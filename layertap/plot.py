"""A plan's speed as a picture: tokens a second over time, and what each lane's seconds went to."""

import io
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from layertap.lane_record import LaneRecord
from layertap.progress import SPENT_ON, SpentOn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LANES = 24
"""Lanes that are drawn; the latest."""

COLOURS: dict[SpentOn, str] = {
    "forward": "#2e7d32",
    "loading": "#90a4ae",
    "compiling": "#546e7a",
    "self-check": "#7e57c2",
    "waiting for data": "#f9a825",
    "waiting for the store": "#c62828",
    "copying to the host": "#6a1b9a",
    "other": "#e0e0e0",
}


def speed_path(plan_id: str) -> str:
    """Where the picture lies in the root."""
    return f"plans/{plan_id}/speed.png"


def speed_png(records: Sequence[LaneRecord]) -> bytes:
    """Draw the records of a plan's lanes as a PNG of some 50 kB."""
    from matplotlib.figure import Figure

    records = records[-MAX_LANES:]
    figure = Figure(figsize=(9, 4.2 + 0.3 * len(records)), dpi=90, layout="constrained")
    speed, split = figure.subplots(2, height_ratios=[3.2, 1 + 0.3 * len(records)])
    _draw_speed(speed, records)
    _draw_split(split, records)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def tokens_per_s(record: LaneRecord) -> list[tuple[float, float]]:
    """Tokens a second between neighbouring samples, at the later one's seconds since the lane opened."""
    pairs = zip(record.samples, record.samples[1:], strict=False)
    return [(b[0], max(0.0, b[1] - a[1]) / (b[0] - a[0])) for a, b in pairs if b[0] > a[0]]


def _draw_speed(axes: "Axes", records: Sequence[LaneRecord]) -> None:
    opened = [datetime.fromisoformat(record.opened_at) for record in records]
    for record, at in zip(records, opened, strict=True):
        begin_s = (at - min(opened)).total_seconds()
        points = tokens_per_s(record)
        axes.plot(
            [(begin_s + second) / 60 for second, _ in points],
            [rate for _, rate in points],
            label=record.lane,
            marker="." if len(points) < 30 else "",
        )
    axes.set(xlabel="minutes since the first lane opened", ylabel="tokens/s", ylim=(0, None))
    axes.grid(alpha=0.3)


def _draw_split(axes: "Axes", records: Sequence[LaneRecord]) -> None:
    names = [record.lane for record in records]
    left = [0.0] * len(records)
    for on in SPENT_ON:
        shares = [100 * record.seconds.get(on, 0.0) / max(record.elapsed_s, 1e-9) for record in records]
        axes.barh(names, shares, left=left, color=COLOURS[on], label=on)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set(xlabel="% of the lane's seconds", xlim=(0, 100))
    axes.invert_yaxis()
    axes.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.35))
