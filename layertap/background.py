"""Calls in threads that hold up nobody."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
