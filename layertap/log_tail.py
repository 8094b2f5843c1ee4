"""The last lines of a logger, kept so that a failure can quote them."""

import logging
from collections import deque
from types import TracebackType
from typing import Self

MAX_LINES = 40


class LogTail(logging.Handler):
    """Remembers the last lines of the `layertap` loggers. A context manager: it listens inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a record."""
        self._lines.append(self.format(record))

    @property
    def text(self) -> str:
        """The lines, oldest first."""
        return "\n".join(self._lines)

    def __enter__(self) -> Self:
        logging.getLogger("layertap").addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("layertap").removeHandler(self)
