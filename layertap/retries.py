"""How long a store's failures are borne with: obstore's own retries for seconds, then ours.

Retries are here and nowhere above the store: whatever still fails is the caller's to give up on.
"""

import random
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain, repeat
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import BaseError

from layertap.errors import StoreError
from layertap.store_errors import CONFLICT_CODES, EXPIRED, OF_CREDENTIALS

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

OBSTORE_S = 5.0
"""Seconds for which obstore repeats a request itself: a part of an upload needn't take all of it along. No
longer, for its calls can't be ended from outside."""

PASSES = re.compile(
    "|".join(
        (
            "error sending request",
            "status code: (?:408|429|5)",
            "request or response body error",
            r"\(code: (?:InternalError|SlowDown)\)",
            *(f"<Code>{code}</Code>" for code in ("BadDigest", "NoSuchUpload", *CONFLICT_CODES)),
        )
    )
)
"""Failures of obstore at which another try helps: no connection, or no answer on it; a store that is busy; a
reply that was cut off; some objects of many that weren't deleted; a body that was damaged on its way; an
upload that was completed by a try whose reply got lost, or by another lane, so that the next one finds it no
more; and others who create the object now."""

OF_BOTO3 = re.compile(r"endpoint URL|An error occurred \((?:408|429|5)")
"""The same failures as boto3 says them, of which `patiently` is told as StoreError."""

WAITS_S = (0.2, 0.6, 1.8, 5.0, 10.0)
"""The longest waits between tries, the last of them for all that follow; each is drawn from below it."""


def is_away(error: StoreError) -> bool:
    """Whether a store doesn't answer, or is too busy to: what it says for good needs another setting."""
    return type(error) is StoreError and any(found.search(str(error)) for found in (PASSES, OF_BOTO3))


def in_obstore(retry: "RetryConfig") -> "RetryConfig":
    """The part of these retries that is left to obstore."""
    return {**retry, "retry_timeout": min(retry["retry_timeout"], timedelta(seconds=OBSTORE_S))}


def patiently(
    operation: Callable[[], _T],
    at_most: timedelta,
    *,
    renew: Callable[[], None],
    given_up: threading.Event,
) -> _T:
    """Repeat an operation, all of it, as long as it fails with what may pass.

    Args:
        operation: what is done.
        at_most: no try begins later than this.
        renew: called before the next try where the credentials have expired; and once where others may help.
        given_up: once it is set, what fails is tried no more.
    """
    deadline, unasked = time.monotonic() + at_most.total_seconds(), True
    waits_s = chain(WAITS_S, repeat(WAITS_S[-1]))
    while True:
        try:
            return operation()
        except (BaseError, FileNotFoundError, StoreError) as error:
            expired = EXPIRED.search(str(error)) is not None
            may_be = unasked and OF_CREDENTIALS.search(str(error)) is not None
            passes = type(error) is StoreError or PASSES.search(str(error)) is not None
            if not (expired or may_be or passes) or time.monotonic() > deadline:
                raise
            if expired or may_be:
                renew()
                unasked = False
            if given_up.wait(random.uniform(0, next(waits_s))):
                raise
