"""The end of a lane whose device hangs: nothing inside the process can take the call back."""

import logging
import os
import signal
from collections.abc import Mapping

from layertap.progress import Clock, SpentOn

WEDGED_S = 300.0
"""Seconds a forward pass may take at least before its device counts as hung."""

TIMES_TYPICAL = 20
"""A pass that takes so many times the mean of those before is hung, if `WEDGED_S` are over too."""

WATCHED: Mapping[SpentOn, str] = {
    "forward": "a forward",
    "copying to the host": "a copy to the host",
    "self-check": "a self-check",
}
"""What waits for the device and for nothing else, in words."""

log = logging.getLogger(__name__)


def wedged(clock: Clock) -> str | None:
    """What a lane has hung in for too long, in words; None while all is well."""
    for on, words in WATCHED.items():
        open_s, mean_s = clock.open_s(on), clock.mean_s(on)
        if open_s > max(WEDGED_S, TIMES_TYPICAL * mean_s):
            return f"no end of {words} for {open_s:.0f} s, where one takes {mean_s:.3g} s: the device hangs"
    return None


def blamed(clocks: Mapping[int, Clock]) -> int | None:
    """The shard that has waited for the device the longest, by the clocks of those in flight, or None.

    One that waits for its turn, or for the store, is not to blame that the device hangs.
    """
    waited_s = {shard: max(clock.open_s(on) for on in WATCHED) for shard, clock in clocks.items()}
    longest = max(waited_s, key=lambda shard: waited_s[shard], default=None)
    return longest if longest is not None and waited_s[longest] else None


def kill_process_group() -> None:
    """Kill this process, and all of its group if it leads one, as the engine of a flow run does."""
    log.critical("this lane's process ends itself")
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
