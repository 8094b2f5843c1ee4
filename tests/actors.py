"""Work on a store that is done request by request, with others at work in between."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from layertap.store import Store

LISTS_AND_WRITES = ("list", "put", "create", "delete")


class _Dies(BaseException):
    """Ends an actor before its next request."""


class Actor:
    """A thread that works only while it is told to go on, so that all that happens has one order."""

    def __init__(
        self, work: Callable[[Store], Any], store: Store, requests: Sequence[str] = LISTS_AND_WRITES
    ) -> None:
        """Nothing is done yet; before each of the requests to `store`, which is its own, the actor waits."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self._dies = False
        self._may_go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        for name in requests:
            setattr(store, name, self._waiting(getattr(store, name)))
        self._thread = threading.Thread(target=self._run, args=(work, store), daemon=True)
        self._thread.start()

    def go_on(self, num_requests: int) -> None:
        """Let it do so many requests, or all that it still has to; raises what its work did."""
        for _ in range(num_requests):
            if self.ended:
                break
            self._may_go.release()
            self._waits.acquire()
        if self.error:
            raise self.error

    def die(self) -> None:
        """End it where it is."""
        self._dies = True
        self.go_on(1)
        self._thread.join()

    def _run(self, work: Callable[[Store], Any], store: Store) -> None:
        self._may_go.acquire()
        try:
            if not self._dies:
                self.result = work(store)
        except _Dies:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._waits.release()

    def _waiting(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def when_told(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is self._thread:
                self._waits.release()
                self._may_go.acquire()
                if self._dies:
                    raise _Dies
            return request(*arguments, **options)

        return when_told
