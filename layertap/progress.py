"""Where a lane's seconds go and what holds it up; tokens and rows a second, and the time that is left."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

SpentOn = Literal[
    "compiling",
    "self-check",
    "forward",
    "loading",
    "waiting for data",
    "copying to the host",
    "waiting for the store",
    "other",
]
"""What a second of a lane can go to. Where several are true of it, it counts under the first of them."""

SPENT_ON: tuple[SpentOn, ...] = get_args(SpentOn)

START: tuple[SpentOn, ...] = ("loading", "compiling", "self-check")
"""What a lane does before its first shard, and seldom after it."""

NOTEWORTHY_WAIT = 0.1
"""Share of a lane's working time from which a wait, and not the forward pass, is what holds it up."""

WAYS_OUT: Mapping[SpentOn, str] = {
    "waiting for data": "a faster way from the store to this host, or fewer other processes on its cores",
    "waiting for the store": "more upload bandwidth or fewer lanes on it",
    "copying to the host": "a faster link between GPU and host, or fewer layers to store",
    "other": "the lane had no shard, or one that waited for another try",
}
"""What would make a wait shorter; for `other`, what it is."""


class Clock:
    """Every second since the clock was made, under exactly one name. Safe to share between threads.

    Threads enter blocks of their own, and blocks may lie in one another. A second in which the clock is in
    several counts under the name that comes first in `SpentOn`; in none, under `other`.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._entered_at: dict[SpentOn, list[float]] = {on: [] for on in SPENT_ON}
        self._seconds: dict[SpentOn, float] = dict.fromkeys(SPENT_ON, 0.0)
        self._booked_until = now()
        self._num_over: Counter[SpentOn] = Counter()
        self._over_s: dict[SpentOn, float] = dict.fromkeys(SPENT_ON, 0.0)

    @contextmanager
    def spent(self, on: SpentOn) -> Iterator[None]:
        """Count the seconds of the block under `on`, also when it raises."""
        entered_at = self._enter(on)
        try:
            yield
        finally:
            self._leave(on, entered_at)

    @property
    def seconds(self) -> dict[str, float]:
        """All seconds so far, by what they were spent on; what took none is left out."""
        with self._lock:
            self._book()
            return {on: spent_s for on, spent_s in self._seconds.items() if spent_s}

    def open_s(self, on: SpentOn) -> float:
        """Seconds since the oldest block of `on` was entered that hasn't been left; 0 if there is none."""
        with self._lock:
            entered_at = self._entered_at[on]
            return self._now() - min(entered_at) if entered_at else 0.0

    def mean_s(self, on: SpentOn) -> float:
        """Mean seconds of the blocks of `on` that are over; 0 before the first."""
        with self._lock:
            return self._over_s[on] / max(self._num_over[on], 1)

    def _enter(self, on: SpentOn) -> float:
        with self._lock:
            self._book()
            self._entered_at[on].append(self._booked_until)
            return self._booked_until

    def _leave(self, on: SpentOn, entered_at: float) -> None:
        with self._lock:
            self._book()
            self._entered_at[on].remove(entered_at)
            self._num_over[on] += 1
            self._over_s[on] += self._booked_until - entered_at

    def _book(self) -> None:
        until = self._now()
        on: SpentOn = next((on for on in SPENT_ON if self._entered_at[on]), "other")
        self._seconds[on] += until - self._booked_until
        self._booked_until = until


def bottleneck(seconds: Mapping[str, float], *, device: str) -> str:
    """What holds a lane up, as one sentence without a full stop.

    A device that has to wait for more than a tenth of its working time is held up by what it waits for,
    however much of the rest goes into the forward pass.

    Args:
        seconds: the lane's seconds by what they went to, all of them.
        device: what computes: `GPU` or `CPU`.
    """
    total_s = sum(seconds.values())
    start_s = sum(seconds.get(on, 0.0) for on in START)
    if start_s > total_s / 2:
        what = max(START, key=lambda on: seconds.get(on, 0.0))
        return (
            f"bound by its start: {_percent(start_s, total_s)} of {format_duration(total_s)} gone before the "
            f"work, most of it in {what}; a longer plan or fewer lanes would spread it"
        )
    working_s = total_s - start_s
    waits = {on: seconds.get(on, 0.0) for on in WAYS_OUT}
    wait = max(waits, key=lambda on: waits[on])
    if not working_s:
        return "not at work yet"
    if waits[wait] < NOTEWORTHY_WAIT * working_s:
        share = _percent(seconds.get("forward", 0.0), working_s)
        return f"bound by the {device}: {share} of the time in the forward pass"
    share = _percent(waits[wait], working_s)
    if wait == "other":
        return f"bound by none of {device}, data and store: {share} of the time elsewhere; {WAYS_OUT[wait]}"
    thing = wait.removeprefix("waiting for ").removeprefix("the ")
    return f"bound by the {thing}: {share} of the time waiting for it; {WAYS_OUT[wait]} would speed it up"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


class Rate:
    """Tokens and rows a second over the last minutes, and from them the time that is left.

    The time left goes by tokens, not by rows or shards: a row costs what its tokens cost.
    """

    def __init__(self, window_s: float = 120.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_s = window_s
        self._seen: deque[tuple[float, int, int]] = deque()

    def update(self, num_tokens: int, num_rows: int) -> None:
        """Note how many tokens and rows are done by now."""
        now = self._clock()
        self._seen.append((now, num_tokens, num_rows))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()

    def _per_second(self, what: int) -> float:
        if len(self._seen) < 2:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        return max(0.0, (last[what] - first[what]) / max(last[0] - first[0], 1e-9))

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over the window; 0 before two updates."""
        return self._per_second(1)

    @property
    def samples_per_s(self) -> float:
        """Rows a second over the window; 0 before two updates."""
        return self._per_second(2)

    def eta_s(self, tokens_left: int) -> float | None:
        """Seconds until `tokens_left` tokens are done, or None while nothing moves."""
        if tokens_left == 0:
            return 0.0
        rate = self.tokens_per_s
        return tokens_left / rate if rate > 0 else None


def format_duration(seconds: float | None) -> str:
    """`1 h 05 min`, `4 min 10 s`, `12 s`, or `unknown`."""
    if seconds is None:
        return "unknown"
    minutes, whole_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole_s:02d} s" if minutes else f"{whole_s} s"


def format_bytes(num_bytes: float) -> str:
    """`14.8 TB`, `503 MB`, `12 B`; powers of 1000."""
    exponent = min(5, int(math.log(max(num_bytes, 1), 1000)))
    scaled = num_bytes / 1000**exponent
    return f"{scaled:.0f} B" if exponent == 0 else f"{scaled:.3g} {'kMGTP'[exponent - 1]}B"
