"""The end of a lane whose device hangs: nothing inside the process can take the call back."""

import logging
import os
import signal

from layertap.progress import Clock

WEDGED_S = 300.0
"""Seconds a forward pass may take at least before its device counts as hung."""

TIMES_TYPICAL = 20
"""A pass that takes so many times the mean of those before is hung, if `WEDGED_S` are over too."""

log = logging.getLogger(__name__)


def wedged(clock: Clock) -> str | None:
    """What a lane has hung in for too long, in words; None while all is well."""
    for on in ("forward", "self-check"):
        open_s, mean_s = clock.open_s(on), clock.mean_s(on)
        if open_s > max(WEDGED_S, TIMES_TYPICAL * mean_s):
            return f"no end of a {on} for {open_s:.0f} s, where one takes {mean_s:.3g} s: the device hangs"
    return None


def kill_process_group() -> None:
    """Kill this process, and all of its group if it leads one, as the engine of a flow run does."""
    log.critical("this lane's process ends itself")
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
