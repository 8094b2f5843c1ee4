"""How far a run is, as the store shows it; for whoever looks on, so nothing heavy is imported."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from layertap.background import at_once
from layertap.catalog import HAS_ENDED, Catalog, PlanRecord
from layertap.progress import Rate, format_duration
from layertap.records import Outcome
from layertap.report import MAX_TABLE_ROWS, Work
from layertap.shard_state import ShardState, ShardStatus
from layertap.watcher import BEAT_S, Watcher

SETTLED_STATES = (*HAS_ENDED, ShardState.FAILED)
HELD = (ShardState.CLAIMED, ShardState.STALE)

ATTENTION = [
    ShardState.FAILED,
    ShardState.STALE,
    ShardState.CLAIMED,
    ShardState.WAITING,
    ShardState.VOID,
    ShardState.COMMITTED,
]
"""States in the order in which a person wants to see their shards."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run is, as the store shows it."""

    num_tokens: int
    num_tokens_done: int
    num_rows: int
    num_rows_done: int
    tokens_per_s: float
    samples_per_s: float
    eta_s: float | None
    shards_by_state: dict[str, int]
    num_claimable: int
    """Shards that a further lane could take now."""

    lanes: dict[str, int]
    """Shards each live lane holds."""

    silent_lanes: frozenset[str]
    """Lanes that hold stale claims and no other, also of shards that have failed by that."""

    shards: list[dict[str, Any]]
    """A row a shard, those that need a look first; at most 100."""

    @property
    def percent(self) -> float:
        """Share of the plan's tokens that is done, in percent."""
        return 100.0 * self.num_tokens_done / max(self.num_tokens, 1)

    @property
    def finished(self) -> bool:
        """Whether every shard has an outcome or has failed for good."""
        return sum(self.shards_by_state.values()) == sum(
            self.shards_by_state.get(state, 0) for state in SETTLED_STATES
        )

    def __str__(self) -> str:
        return (
            f"{self.num_rows_done:,} of {self.num_rows:,} rows, {self.samples_per_s:.1f} samples/s, "
            f"{self.tokens_per_s:,.0f} tokens/s, ETA {format_duration(self.eta_s)}"
        )


class Watch:
    """Looks at a plan's state in the store, again and again."""

    def __init__(self, catalog: Catalog, plan: PlanRecord) -> None:
        self.catalog = catalog
        self.plan = plan
        self._watcher = Watcher(catalog, plan.plan_id, beat_s=BEAT_S)
        self._rate = Rate()
        self._shard_rates: dict[tuple[int, int], Rate] = {}
        self.statuses: dict[int, ShardStatus] = {}
        """Of each shard, at the last look."""

        self._endings: dict[tuple[int, ShardState, int], dict[str, Any]] = {}
        self._started_at = time.monotonic()
        self._first: RunProgress | None = None

    def poll(self) -> RunProgress:
        """Look once."""
        self.statuses = statuses = self._watcher.poll()
        held = self._claims([k for k, s in statuses.items() if s.state in HELD])
        died = self._claims([k for k, s in statuses.items() if _failed_by_last_death(s)])
        lanes = Counter(c["lane"] for k, c in held.items() if statuses[k].state == ShardState.CLAIMED)
        rows = [self._row(k, statuses[k], held.get(k, {})) for k in range(len(self.plan.shards))]
        tokens_done = sum(row["tokens done"] for row in rows)
        rows_done = sum(row["rows done"] for row in rows)
        self._rate.update(tokens_done, rows_done)
        states = Counter(str(status.state) for status in statuses.values())
        shown = sorted(rows, key=lambda row: (ATTENTION.index(row["state"]), row["shard"]))[:MAX_TABLE_ROWS]
        paces = self._paces([row for row in rows if row["state"] == ShardState.CLAIMED])
        endings = at_once(self._ended, [row["shard"] for row in shown])
        progress = RunProgress(
            num_tokens=self.plan.num_tokens,
            num_tokens_done=tokens_done,
            num_rows=self.plan.num_rows,
            num_rows_done=rows_done,
            tokens_per_s=self._rate.tokens_per_s,
            samples_per_s=self._rate.samples_per_s,
            eta_s=self._rate.eta_s(self.plan.num_tokens - tokens_done),
            shards_by_state=dict(states),
            num_claimable=states[ShardState.WAITING] + states[ShardState.STALE],
            lanes=dict(lanes),
            silent_lanes=frozenset(c["lane"] for c in (*held.values(), *died.values())) - lanes.keys(),
            shards=[{**row, **paces.get(row["shard"], {}), **endings[row["shard"]]} for row in shown],
        )
        self._first, self._last = self._first or progress, progress
        return progress

    def forget(self) -> None:
        """Take no lane for silent because of what it could not write until now."""
        self._watcher.forget()

    def work(self, bytes_per_token: int) -> Work:
        """What was computed between the first look and the last."""
        assert self._first is not None
        num_tokens = self._last.num_tokens_done - self._first.num_tokens_done
        return Work(
            num_rows=self._last.num_rows_done - self._first.num_rows_done,
            num_tokens=num_tokens,
            num_bytes=num_tokens * bytes_per_token,
            elapsed_s=time.monotonic() - self._started_at,
        )

    def failures(self) -> dict[int, str]:
        """Shards that had failed for good at the last look, with their last error."""
        failed = [k for k, status in self.statuses.items() if status.state == ShardState.FAILED]
        return {k: told["error"] for k, told in at_once(self._last_failure, failed).items()}

    def _last_failure(self, shard: int) -> dict[str, Any]:
        return self.catalog.last_failure(self.plan.plan_id, shard, self.statuses[shard])

    def _claims(self, shards: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The latest claim of each shard, but for damaged ones: whose they are can't be told."""
        plan_id = self.plan.plan_id
        claims = at_once(lambda k: self.catalog.read_claim(plan_id, k, self.statuses[k].claim), shards)
        return {k: claim for k, claim in claims.items() if claim}

    def _paces(self, at_work: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Of each shard at work, tokens a second since its claim was seen first, and the time left."""
        claims = {(row["shard"], row["claims"]): row for row in at_work}
        self._shard_rates = {claim: self._shard_rates.get(claim) or Rate() for claim in claims}
        paces = {}
        for claim, row in claims.items():
            rate = self._shard_rates[claim]
            rate.update(row["tokens done"], row["rows done"])
            left_s = rate.eta_s(row["tokens"] - row["tokens done"])
            paces[row["shard"]] = {"tokens/s": round(rate.tokens_per_s), "ETA": format_duration(left_s)}
        return paces

    def _ended(self, shard: int) -> dict[str, Any]:
        """The lane of a shard that is settled, its pace or the first line of its error; each is read once."""
        status, plan_id = self.statuses[shard], self.plan.plan_id
        if status.state not in (ShardState.COMMITTED, ShardState.FAILED):
            return {}
        key = (shard, status.state, status.claim)
        if key not in self._endings:
            if status.state == ShardState.COMMITTED:
                outcome = self.catalog.outcome(plan_id, shard)
                ending = {"lane": outcome.lane, "tokens/s": _tokens_per_s(outcome)}
            else:
                failure = self._last_failure(shard)
                ending = {"lane": failure.get("lane", ""), "error": failure["error"].splitlines()[0]}
            self._endings[key] = ending
        return self._endings[key]

    def _row(self, shard: int, status: ShardStatus, claim: dict[str, Any]) -> dict[str, Any]:
        record = self.plan.shards[shard]
        whole = status.state == ShardState.COMMITTED
        return {
            "shard": shard,
            "state": str(status.state),
            "lane": claim.get("lane", ""),
            "tokens/s": "",
            "ETA": "",
            "error": "",
            "claims": status.claim,
            "failures": status.num_failures,
            "rows": record.num_rows,
            "rows done": record.num_rows if whole else claim.get("num_rows", 0),
            "tokens": record.num_tokens,
            "tokens done": record.num_tokens if whole else claim.get("num_tokens", 0),
        }


def _failed_by_last_death(status: ShardStatus) -> bool:
    return status.state == ShardState.FAILED and status.last_death == status.claim


def _tokens_per_s(outcome: Outcome) -> int:
    start, end = map(datetime.fromisoformat, (outcome.started_at, outcome.ended_at))
    return round(outcome.num_tokens / max(1.0, (end - start).total_seconds()))  # told in whole seconds
