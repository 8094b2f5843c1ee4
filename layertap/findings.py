"""Checks before work: all that is wrong on a host is told in one message, not one thing a try."""

from collections.abc import Iterator
from contextlib import contextmanager

from layertap.errors import LayertapError, NotReadyError


class Findings:
    """What checks have found that don't depend on each other.

    Args:
        summary: what the findings together mean, in words.
    """

    def __init__(self, summary: str) -> None:
        self._summary = summary
        self._errors: list[LayertapError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Go on behind a check that fails, and remember how."""
        try:
            yield
        except NotReadyError as error:
            self._errors += error.findings
        except LayertapError as error:
            self._errors.append(error)

    def check(self) -> None:
        """Raise what was found so far.

        Raises:
            NotReadyError: several findings, all in its message; a single one is raised as it came.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            told = "".join(f"\n  {number}. {error}" for number, error in enumerate(self._errors, start=1))
            raise NotReadyError(f"{self._summary}: {len(self._errors)} findings:{told}", self._errors)
