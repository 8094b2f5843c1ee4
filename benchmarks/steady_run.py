"""The engine over a stretch of steady state, with a folder whose verified shards are deleted meanwhile."""

import itertools
import shutil
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from layertap.bench.engine import is_as_written
from layertap.extract import Extractor, ShardResult
from layertap.progress import Clock
from layertap.records import ShardRows

WARM_S = 8.0
"""Seconds of the engine before it is measured: threads, page cache and clocks settle."""


def verify_and_delete(folder: Path, prefix: str, result: ShardResult) -> None:
    """Read a shard back through the page cache, compare checksums, delete it."""
    for file in [*result.files, result.index]:
        if not is_as_written(folder / prefix / file["name"], file):
            raise SystemExit(f"{prefix}/{file['name']} isn't what was written")
    shutil.rmtree(folder / prefix)


def dirty_bytes() -> int:
    """Bytes the page cache has still to write."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Dirty", "Writeback"))


@dataclass
class SteadyRun:
    """The engine running on before and after the stretch that is measured."""

    extractor: Extractor
    shards: list[ShardRows]
    folder: Path
    clock: Clock
    stored: list[tuple[float, int, int]] = field(default_factory=list)
    """When a batch was durable, its rows and its tokens."""

    results: list[ShardResult] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    dirty_bytes: int = 0

    def measure(self, seconds: float) -> tuple[float, int, int]:
        """Extract shard after shard, two in flight.

        Returns:
            Seconds from the first batch stored in the stretch to the last; rows and tokens after the first.
        """
        with ThreadPoolExecutor(1) as self._verifying, ThreadPoolExecutor(2) as self._in_flight:
            self._numbers = itertools.count()
            self._running: set[Future[None]] = set()
            self._verified: list[Future[None]] = []
            self._go_on(WARM_S)
            before, begin = self.clock.seconds, time.perf_counter()
            self._go_on(seconds)
            after, end = self.clock.seconds, time.perf_counter()
            self.dirty_bytes = dirty_bytes()
            for future in self._running:
                future.result()
            for future in self._verified:
                future.result()
        self.elapsed_s = end - begin
        self.spent = {on: s - before.get(on, 0.0) for on, s in after.items()}
        counted = sorted(batch for batch in self.stored if begin <= batch[0] <= end)
        rows, tokens = (sum(batch[k] for batch in counted[1:]) for k in (1, 2))
        return counted[-1][0] - counted[0][0], rows, tokens

    def _go_on(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            while len(self._running) < 2:
                self._running.add(self._in_flight.submit(self._extract, next(self._numbers)))
            done, self._running = wait(self._running, timeout=0.1, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def _extract(self, number: int) -> None:
        prefix, so_far = f"shard-{number:05d}", (0, 0)

        def note(rows: int, tokens: int) -> None:
            nonlocal so_far
            self.stored.append((time.perf_counter(), rows - so_far[0], tokens - so_far[1]))
            so_far = rows, tokens

        shard = self.shards[number % len(self.shards)]
        result = self.extractor.extract_shard(shard, prefix, on_progress=note, should_stop=lambda: None)
        self.results.append(result)
        self._verified.append(self._verifying.submit(verify_and_delete, self.folder, prefix, result))
