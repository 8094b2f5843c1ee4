"""What a benchmark watches beside its clock: memory, and who is kept from the interpreter."""

import os
import statistics
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

TICK_S = 0.001
MEMORY_EVERY_S = 0.02


class Sampler:
    """A thread that looks again and again while a `with` block runs."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()


class MemoryPeak(Sampler):
    """The largest anonymous memory of this process while the block runs; mapped files don't count."""

    peak_bytes = 0

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())
            if self._ended.wait(MEMORY_EVERY_S):
                return


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class GilTicker(Sampler):
    """How long a Python thread that wakes every millisecond waits for the interpreter.

    From the time a wake-up is late the time is taken off that the thread was runnable and had no core
    (`/proc/thread-self/schedstat`). What is left is waiting for the GIL, and the timer's slack of 0.1 ms.
    Python code gives the GIL up after 5 ms when asked; a longer wait means that C code held it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []

    def _watch(self) -> None:
        before = time.perf_counter()
        schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        queued_before_s = _queued_s(schedstat)
        while not self._ended.is_set():
            time.sleep(TICK_S)
            queued_s, now = _queued_s(schedstat), time.perf_counter()
            self.waits_s.append(max(0.0, now - before - TICK_S - (queued_s - queued_before_s)))
            queued_before_s, before = queued_s, now
        os.close(schedstat)

    def figures(self) -> dict[str, float]:
        """Number of wake-ups, and the median, longest and total wait in milliseconds."""
        waits_ms = [1000 * wait for wait in self.waits_s]
        return {
            "wake-ups": len(waits_ms),
            "median_ms": statistics.median(waits_ms),
            "longest_ms": max(waits_ms),
            "total_ms": sum(waits_ms),
        }


def _queued_s(schedstat: int) -> float:
    """Seconds that this thread was runnable but not run."""
    return int(os.pread(schedstat, 100, 0).split()[1]) / 1e9
