"""Living lanes told from dead ones, by whether their claims change."""

import time
from collections.abc import Callable

from layertap.catalog import Catalog, Snapshot
from layertap.shard_state import ShardStatus, shard_state

BEAT_S = 10.0
"""Seconds between two beats of a claim; a claim without a beat for three of them is stale."""

BEATS_TO_STALE = 3


class Watcher:
    """Looks at the shards of a plan: a claim that isn't seen to change for three beats is stale.

    Only changes count, never the time of day on another host. Between two looks at most one beat is counted:
    whoever was suspended, or cut off from the store, has not seen that the others were silent. Nor has who
    could look but not write: let it `forget`.
    """

    def __init__(
        self,
        catalog: Catalog,
        plan_id: str,
        beat_s: float = BEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._plan_id = plan_id
        self._num_shards = len(catalog.plan(plan_id).shards)
        self._beat_s = beat_s
        self._clock = clock
        self._looked_at = clock()
        self._watched_s = 0.0
        self._seen: dict[int, tuple[tuple[int, str | None], float]] = {}

    def poll(self) -> dict[int, ShardStatus]:
        """The status of every shard of the plan."""
        now = self._clock()
        self._watched_s += min(now - self._looked_at, self._beat_s)
        self._looked_at = now
        snapshot = self._catalog.snapshot(self._plan_id)
        return {
            shard: shard_state(snapshot.names.get(shard, ()), self._stale(shard, snapshot))
            for shard in range(self._num_shards)
        }

    def forget(self) -> None:
        """Count anew how long each claim has not changed."""
        self._seen.clear()

    def _stale(self, shard: int, snapshot: Snapshot) -> list[int]:
        if shard not in snapshot.claims:
            return []
        number, claim = snapshot.claims[shard]
        tag = (number, claim.e_tag)
        before, since_s = self._seen.get(shard, (None, 0.0))
        if tag != before:
            self._seen[shard] = (tag, self._watched_s)
            return []
        return [number] if self._watched_s - since_s >= BEATS_TO_STALE * self._beat_s else []
