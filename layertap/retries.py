"""How long a store's failures are borne with: obstore's own retries, and ours where those end.

Retries are here and nowhere above the store: whatever still fails is the caller's to give up on.
"""

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import BaseError

from layertap.errors import StoreError
from layertap.store_errors import CONFLICT_CODES, EXPIRED_CODES, UNEXPLAINED

if TYPE_CHECKING:
    from obstore.store import RetryConfig

_T = TypeVar("_T")

UNCOUNTED = 1_000_000
"""Retries end by their time alone: how many fit into it depends on jitter."""

PATIENT: "RetryConfig" = {
    "max_retries": UNCOUNTED,
    "retry_timeout": timedelta(minutes=10),
    "backoff": {
        "base": 3,  # each wait is drawn from between the first one and so many times the last: 2 hardly grows
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=10),
    },
}
"""Rides out a restart of the store. Retries use jitter and a fresh body."""

ENDS_EARLY = (
    "request or response body error",
    "(code: InternalError)",
    "(code: SlowDown)",
    *(f"<Code>{code}</Code>" for code in ("BadDigest", "NoSuchUpload", *CONFLICT_CODES)),
)
"""Failures at which obstore gives up and another try helps: a reply that was cut off; some objects of many
that weren't deleted; a body that was damaged on its way; an upload that was completed by a try whose reply
got lost, or by another lane, so that the next one finds it no more; and others who create the object now."""

WAITS_S = (0.2, 0.6, 1.8, 5.0, *[10.0] * 60)
"""The longest waits between such tries; each is drawn from below it."""


def patiently(operation: Callable[[], _T], at_most: timedelta, *, renew: Callable[[], None]) -> _T:
    """Repeat an operation, all of it, where obstore's retries end too early, or there were none.

    Args:
        operation: what is done.
        at_most: no try begins later than this.
        renew: called before the next try where the credentials have expired; and once where they may have.
    """
    deadline, unasked = time.monotonic() + at_most.total_seconds(), True
    for wait_s in WAITS_S:
        try:
            return operation()
        except (BaseError, FileNotFoundError, StoreError) as error:
            expired = any(f"{code}<" in str(error) or f"[{code}]" in str(error) for code in EXPIRED_CODES)
            may_be = unasked and UNEXPLAINED.search(str(error)) is not None
            passes = type(error) is StoreError or any(text in str(error) for text in ENDS_EARLY)
            if not (expired or may_be or passes) or time.monotonic() > deadline:
                raise
            if expired or may_be:
                renew()
                unasked = False
        time.sleep(random.uniform(0, wait_s))
    return operation()
