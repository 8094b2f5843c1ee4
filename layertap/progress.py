"""Rates, ETA by tokens, and where the time goes."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

SpentOn = Literal[
    "loading",
    "self-check",
    "storing the target's files",
    "forward",
    "waiting for data",
    "waiting for the store",
    "other",
]
"""What a second of a lane's device can go to."""


class Clock:
    """Seconds by what they were spent on; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def spent(self, on: SpentOn) -> Iterator[None]:
        """Count the seconds of the block under `on`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(on, time.perf_counter() - start)

    def add(self, on: SpentOn, elapsed_s: float) -> None:
        """Count `elapsed_s` seconds under `on`."""
        with self._lock:
            self._seconds[on] = self._seconds.get(on, 0.0) + elapsed_s

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far, by what they were spent on."""
        with self._lock:
            return dict(self._seconds)


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
