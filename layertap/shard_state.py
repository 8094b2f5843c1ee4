"""Where a shard stands, decided from the names in its plan's state folder alone."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

LANES_TO_FAIL = 2
"""A shard that failed on so many different lanes has failed for good."""

TRIES_TO_FAIL = 3
"""So has one with so many failures and deaths in all."""


class ShardState(StrEnum):
    """Where a shard stands."""

    WAITING = "waiting"
    """Nobody holds it; it may be claimed."""

    CLAIMED = "claimed"
    """A lane holds it and beats its claim."""

    STALE = "stale"
    """Its lane has stopped beating; it may be claimed again."""

    FAILED = "failed"
    """It failed too often; a `retry` makes it wait again."""

    COMMITTED = "committed"
    """Its outcome stands."""

    VOID = "void"
    """Its outcome was withdrawn: its rows count as not stored."""


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
    """A shard's state and what is behind it, both since the last retry."""

    state: ShardState

    claim: int = 0
    """Number of the latest claim, 0 if there was none; the next claim is one higher."""

    num_failures: int = 0
    """Claims that ended with a recorded error."""

    num_deaths: int = 0
    """Claims whose lane went silent."""

    last_failure: str = ""
    """Name of the last recorded error among its state objects; empty if there is none."""

    last_death: int = 0
    """Number of the last claim whose lane went silent, 0 if there was none."""


def shard_state(names: Iterable[str], stale: Collection[int] = ()) -> ShardStatus:
    """Where a shard stands.

    Args:
        names: the shard's state objects without its number: `claim-1`, `fail-1.lane-a`, `release-1`,
            `retry-1`, `outcome`, `void-1`.
        stale: numbers of claims whose lane no longer beats.
    """
    numbers, failed_on = _numbers_by_kind(names)
    unended = numbers["claim"] - numbers["release"] - set(failed_on)
    latest, last_retry = max(numbers["claim"], default=0), max(numbers["retry"], default=0)
    failures = [n for n in failed_on if n > last_retry]
    deaths = [n for n in unended if n > last_retry and (n < latest or n in stale)]
    lanes = {failed_on[n] for n in failures}
    held = latest in unended

    if numbers["void"]:
        state = ShardState.VOID
    elif numbers["outcome"]:
        state = ShardState.COMMITTED
    elif held and latest not in stale:
        state = ShardState.CLAIMED
    elif len(lanes) >= LANES_TO_FAIL or len(failures) + len(deaths) >= TRIES_TO_FAIL:
        state = ShardState.FAILED
    else:
        state = ShardState.STALE if held else ShardState.WAITING
    last_failed = max(failures, default=0)
    return ShardStatus(
        state=state,
        claim=latest,
        num_failures=len(failures),
        num_deaths=len(deaths),
        last_failure=f"fail-{last_failed}.{failed_on[last_failed]}" if failures else "",
        last_death=max(deaths, default=0),
    )


def unended_claims(names: Iterable[str]) -> set[int]:
    """Numbers of the claims of a shard without an outcome that were neither given back nor have failed."""
    numbers, failed_on = _numbers_by_kind(names)
    if numbers["outcome"] or numbers["void"]:
        return set()
    return numbers["claim"] - numbers["release"] - set(failed_on)


def _numbers_by_kind(names: Iterable[str]) -> tuple[dict[str, set[int]], dict[int, str]]:
    """Numbers of the objects of each kind, and the lane of each failure."""
    numbers: dict[str, set[int]] = {
        kind: set() for kind in ("claim", "fail", "release", "retry", "outcome", "void")
    }
    failed_on: dict[int, str] = {}
    for name in names:
        base, _, lane = name.partition(".")
        kind, _, number = base.partition("-")
        if kind in numbers:
            numbers[kind].add(int(number or 0))
        if kind == "fail":
            failed_on[int(number)] = lane
    return numbers, failed_on
