"""The end of a lane whose device hangs: nothing inside the process can take the call back."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

import torch

from layertap.progress import START, Clock, SpentOn

WEDGED_S = 300.0
"""Seconds a forward pass may take at least before its device counts as hung."""

START_S = 1200.0
"""Seconds that the first of what a lane begins with may take: on a fresh host its kernels are compiled."""

TIMES_TYPICAL = 20
"""A pass that takes so many times the mean of those before is hung, if `WEDGED_S` are over too."""

WATCHED: Mapping[SpentOn, str] = {
    "forward": "a forward",
    "copying to the host": "a copy to the host",
    "self-check": "a self-check",
    "compiling": "compiling",
}
"""What waits for the device, or for kernels that it is to run, and for nothing else, in words."""

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
            mean_s = self._clock.mean_s(on)
            at_least_s = START_S if on in START and not mean_s else WEDGED_S
            took_s = min(self._clock.open_s(on), self._watched_s[on] + since_s)
            self._watched_s[on] = took_s
            if took_s > max(at_least_s, TIMES_TYPICAL * mean_s):
                typical = f", where one takes {mean_s:.3g} s" if mean_s else ""
                return f"no end of {words} for {took_s:.0f} s{typical}: the device hangs"
        return None


def can_hang(device: torch.device) -> bool:
    """Whether a pass that doesn't end says that the device hangs: a CPU doesn't, it is slow."""
    return device.type == "cuda"


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
