"""The end of a lane whose device hangs: nothing inside the process can take the call back."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

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


class Watchdog:
    """Looks at a lane's clock every few seconds.

    Between two looks so many seconds are counted at most: a process that was suspended has not seen that its
    device did nothing.
    """

    def __init__(self, clock: Clock, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Watch the device from now on, by looks that are `every_s` seconds apart."""
        self._clock = clock
        self._every_s = every_s
        self._now = now
        self._looked_at = now()
        self._watched_s = dict.fromkeys(WATCHED, 0.0)

    def start(self, end: Callable[[str], None], *, until: threading.Event) -> None:
        """Look until then, in a thread of its own, and tell `end` what hangs."""

        def watch() -> None:
            while not until.wait(self._every_s):
                if reason := self.look():
                    end(reason)

        threading.Thread(target=watch, name="watchdog", daemon=True).start()

    def look(self) -> str | None:
        """What the lane has hung in for too long, in words; None while all is well."""
        now = self._now()
        since_s, self._looked_at = min(now - self._looked_at, self._every_s), now
        for on, words in WATCHED.items():
            took_s, mean_s = self._clock.open_s(on), self._clock.mean_s(on)
            self._watched_s[on] = took_s = min(took_s, self._watched_s[on] + since_s)
            if took_s > max(WEDGED_S, TIMES_TYPICAL * mean_s):
                return (
                    f"no end of {words} for {took_s:.0f} s, where one takes {mean_s:.3g} s: the device hangs"
                )
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
