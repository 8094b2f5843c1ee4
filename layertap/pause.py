"""A run waits for its store while that fails as a whole: it is away, refuses everybody, or is full.

No shard and no lane is charged with it. The store is tried with longer and longer waits in between, and the
run goes on when it answers; or ends, with the store's words, when nothing was committed for too long.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from layertap.errors import StoreError, StoreRefusedError, is_store_wide
from layertap.progress import format_duration
from layertap.retries import is_away
from layertap.store import Store
from layertap.store_check import check_space, check_store, probe

_T = TypeVar("_T")

GIVE_UP_S = 3600.0
"""Seconds from a store's first failure after which a run ends that has committed nothing since."""

POLL_S = 3.0
"""Seconds between two looks at whether it is time to try the store again."""

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0
"""Waits before the store is tried again; each is twice the last, until something is committed."""


class StorePause:
    """Whether a run waits for its store, and why.

    Args:
        store: the run's.
        num_bytes: room that a folder's disk must have for the run to go on, such as a batch file's.
        count_committed: shards that are committed; a store that refuses writes may still say it.
        is_checked: whether the store has passed the checks before a run. Until then it is tried by these, and
            waited for only while it is away: a refusal may be a wrong setting.
        are_at_work: whether lanes run. They end within minutes where the store fails them too, so it is this
            process alone that can't reach it, and commits that it can't see.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        num_bytes: int = 0,
        *,
        is_checked: bool = True,
        count_committed: Callable[[], int] = lambda: 0,
        are_at_work: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._num_bytes = num_bytes
        self._try, self._waits_for = (probe, is_store_wide) if is_checked else (check_store, is_away)
        self._count_committed = count_committed
        self._are_at_work = are_at_work
        self._clock = clock
        self._since_s: float | None = None
        self._due_s = 0.0
        self._wait_s = FIRST_WAIT_S
        self._num_committed = 0
        self.reason = ""
        """Why the run waits; empty while it doesn't."""

        self.was_seen = False
        """Whether the store has failed in this process too, not only in lanes, since the pause began."""

    def begin(self, reason: str) -> None:
        """Wait, or wait on.

        Raises:
            StoreRefusedError: that has been going on for too long.
        """
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s > GIVE_UP_S:
            if not self._are_at_work():
                raise StoreRefusedError(
                    f"{self._store.uri} has failed for {format_duration(now_s - self._since_s)}, and no "
                    f"commit was seen meanwhile: {reason}. What is committed stays: mend the store, then "
                    "start the same run again or press Retry"
                )
            self._since_s = now_s
        self.reason = reason
        self._due_s, self._wait_s = now_s + self._wait_s, min(2 * self._wait_s, LONGEST_WAIT_S)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Wait where the block meets an error that is waited for; it then ends early."""
        try:
            yield
        except StoreError as error:
            if not self._waits_for(error):
                raise
            self.was_seen = True
            self.begin(str(error))

    def is_over(self) -> bool:
        """Try the store if it is time to; whether it answers.

        Raises:
            StoreError: it doesn't.
        """
        if self._clock() < self._due_s:
            return False
        self.note_committed(self._count_committed())
        self.probe()
        self.reason = ""
        return True

    def outlast(self, operation: Callable[[], _T], show: Callable[[str], None]) -> _T:
        """Do what may be begun again at any point, as often as the store fails as a whole on the way.

        Args:
            operation: what is done.
            show: told every few seconds why it waits.

        Raises:
            StoreRefusedError: the store has failed for too long.
        """
        while True:
            with self.noted():
                if not self.reason or self.is_over():
                    return operation()
            show(str(self))
            time.sleep(POLL_S)

    def probe(self) -> None:
        """See whether the store answers, and whether a folder's disk has room.

        Raises:
            StoreError: it doesn't, or hasn't.
        """
        self._try(self._store)
        check_space(self._store, self._num_bytes)

    def note_committed(self, num_shards: int) -> None:
        """Take a commit for a sign that the store has come back for good."""
        if num_shards > self._num_committed:
            self._num_committed, self._since_s, self._wait_s = num_shards, None, FIRST_WAIT_S

    def __str__(self) -> str:
        waited_s = self._clock() - (self._clock() if self._since_s is None else self._since_s)
        return f"waiting for the store for {format_duration(waited_s)} now: {self.reason}"
