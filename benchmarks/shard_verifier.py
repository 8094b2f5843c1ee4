"""Shards read back while a run goes on: checksums compared, batch files deleted, and every row counted."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from layertap.bench.engine import is_as_written
from layertap.catalog import Catalog
from layertap.records import Outcome
from layertap.settled import read_index
from layertap.store import Store
from layertap.versions import Versions

PERIOD_S = 0.5


class ShardVerifier(threading.Thread):
    """Verifies each committed shard of a plan in a folder and deletes its batch files; indices stay."""

    def __init__(self, catalog: Catalog, plan_id: str) -> None:
        super().__init__(name="shard-verifier", daemon=True)
        self._catalog, self._plan_id = catalog, plan_id
        self._folder = Path(catalog.store.uri)
        self._ended = threading.Event()
        self._num_bytes = self._num_files = 0
        self.outcomes: dict[int, Outcome] = {}
        self.wrong: list[str] = []

    def run(self) -> None:
        """Look for new outcomes until told to end."""
        while not self._ended.wait(PERIOD_S):
            self._look()

    def _look(self) -> None:
        for shard in self._catalog.committed(self._plan_id):
            if shard not in self.outcomes:
                outcome = self._catalog.outcome(self._plan_id, shard)
                self._verify(outcome)
                self.outcomes[shard] = outcome

    def _verify(self, outcome: Outcome) -> None:
        prefix = self._catalog.attempt_prefix(self._plan_id, outcome.shard, outcome.attempt)
        for file in [*outcome.files, outcome.index]:
            path = self._folder / prefix / file["name"]
            if not is_as_written(path, file):
                self.wrong.append(str(path))
            self._num_bytes += path.stat().st_size
            self._num_files += 1
            if file is not outcome.index:
                path.unlink()

    def stop(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()

    def finish(self) -> None:
        """Verify what is left, once no lane writes any more."""
        self.stop()
        self._look()

    def figures(self) -> dict[str, Any]:
        """What was read back."""
        return {
            "files": self._num_files,
            "gb": self._num_bytes / 1e9,
            "wrong": self.wrong,
            "shards": len(self.outcomes),
        }


def each_row_once(store: Store, outcomes: Mapping[int, Outcome]) -> dict[str, Any]:
    """Hold the newest version against the indices of the committed shards.

    Args:
        store: the root.
        outcomes: all outcomes of its one plan, by shard.
    """
    versions = Versions(store)
    version = versions.latest()
    if version is None:
        raise SystemExit("no complete version was published")
    table: Any = versions.rows(version, ["extraction_key", "file", "offset", "reason"])
    catalog = Catalog(store)
    (plan_id,) = catalog.plans()
    keys, places = list[bytes](), set[tuple[str, int]]()
    for shard, outcome in outcomes.items():
        prefix = catalog.attempt_prefix(plan_id, shard, outcome.attempt)
        index: Any = read_index(store, prefix, outcome)
        keys += index["extraction_key"].to_pylist()
        names = [f"{prefix}/{name}" for name in index["file"].to_pylist()]
        places |= set(zip(names, index["offset"].to_pylist(), strict=True))
    named = set(zip(table["file"].to_pylist(), table["offset"].to_pylist(), strict=True))
    found = {
        "version": version.number,
        "in_the_dataset": version.num_rows,
        "in_the_version": version.num_stored,
        "places_in_the_version": len(named),
        "in_committed_shards": len(keys),
        "distinct_in_committed_shards": len(set(keys)),
        "keys_in_the_version": len(pc.unique(table["extraction_key"])),
    }
    counts = {value for name, value in found.items() if name != "version"}
    return {**found, "each_exactly_once": len(counts) == 1 and named == places}
