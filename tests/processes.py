"""Test bodies in a process of their own: to fork this one, full of threads, may hang for ever."""

import multiprocessing
from collections.abc import Callable
from typing import Any


def in_fresh_process(body: Callable[..., None], *arguments: Any, timeout_s: float = 90) -> None:
    """Run a function of a test module in a spawned process; it fails as an assertion does."""
    process = multiprocessing.get_context("spawn").Process(target=body, args=arguments)
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0, "see the traceback of the process above"
