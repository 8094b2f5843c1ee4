"""Calls in threads: one that holds up nobody, or many at once."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

REQUESTS_AT_ONCE = 16

_P = ParamSpec("_P")
_T = TypeVar("_T")
_K = TypeVar("_K")


def in_background(name: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T]":
    """Make a call in a daemon thread of its own: unlike a pool's, it lets the process exit if it hangs."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def at_once(request: Callable[[_K], _T], of: Sequence[_K]) -> dict[_K, _T]:
    """What comes of a request for each of these, some at a time: one to a store takes a while."""
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        return dict(zip(of, pool.map(request, of), strict=True))
