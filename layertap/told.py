"""Records by which nothing is decided for good: a damaged one costs what it said, and nothing else."""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from layertap.errors import IntegrityError
from layertap.records import read_record
from layertap.store import Store

log = logging.getLogger(__name__)

_R = TypeVar("_R")


def read_told(store: Store, path: str, parse: Callable[[dict[str, Any]], _R]) -> _R | None:
    """A record, or None with a warning if it is damaged.

    Raises:
        NotFoundError: there is none.
        FormatError: from `parse`.
    """
    try:
        return read_record(path, store.get(path), parse)
    except IntegrityError as error:
        _warn(f"{store.uri} is read without one record: {error}")
        return None


@lru_cache(maxsize=1024)
def _warn(message: str) -> None:
    """Warn once a process: such records are read again and again while a run goes on."""
    log.warning(message)
