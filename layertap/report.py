"""What came of a run, for a person and for the exit code."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice

import pyarrow.parquet as pq

from layertap.errors import TooManyRefusedError
from layertap.progress import format_bytes, format_duration
from layertap.settled import says_way_out
from layertap.store import Store
from layertap.versions import Version, Versions

MAX_TABLE_ROWS = 100
"""Rows of a table that a person looks at; the worst come first, the rest is counted."""

MAX_ROWS_IN_ERROR = 5
"""Missing rows that an error names."""


def check_refused(refused: Mapping[int, str], num_rows: int, max_share: float, way_out: str) -> None:
    """Refuse a dataset with more unfit rows than the policy allows.

    Args:
        refused: row of the dataset -> why, with or without the row's number in front.
        num_rows: rows of the dataset.
        max_share: share of them that may be refused.
        way_out: what to do, and what shows more of the rows; sentences.

    Raises:
        TooManyRefusedError: with the first few rows, their reasons and the way out.
    """
    if len(refused) <= max_share * num_rows:
        return
    first = "".join(
        f"\n  row {row}: {reason.removeprefix(f'row {row}: ')}"
        for row, reason in islice(refused.items(), MAX_ROWS_IN_ERROR)
    )
    raise TooManyRefusedError(
        f"{len(refused):,} of {num_rows:,} rows are refused, above the allowed share of {max_share:.2%}. "
        f"{way_out} The first of them:{first}"
    )


def put_missing_rows(store: Store, version: Version) -> str:
    """Write the rows that a version lacks as a Parquet file; returns its path, empty where it lacks none."""
    rows = Versions(store).missing_rows(version)
    if not len(rows):
        return ""
    sink = BytesIO()
    pq.write_table(rows, sink)
    path = f"reports/version-{version.number}-missing.parquet"
    store.put(path, sink.getvalue())
    return path


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has computed, beside what the store held before it."""

    num_rows: int = 0
    num_tokens: int = 0

    num_bytes: int = 0
    """Bytes of hidden states and token ids."""

    elapsed_s: float = 0.0
    """From the first look at the plan to the last, lanes' loading included."""

    def __str__(self) -> str:
        if not self.num_rows:
            return "0 rows computed now"
        rate = self.num_tokens / self.elapsed_s
        return (
            f"{self.num_rows:,} rows computed now: {self.num_tokens:,} tokens, "
            f"{format_bytes(self.num_bytes)} in {format_duration(self.elapsed_s)}, {rate:,.0f} tokens/s"
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a run."""

    uri: str
    """Address of the root."""

    version: Version
    num_rows: int
    missing: dict[int, str]
    """Row of the dataset -> why it isn't stored."""

    missing_rows: str
    """Path of a Parquet file with their index, id, num_tokens and reason; empty where none is missing."""

    failures: dict[int, str]
    """Shard that failed for good -> its last error."""

    shard_table: str
    """Path of a Parquet file with how each shard of the plan stands; empty where nobody watched one."""

    work: Work

    def check(self, max_refused_share: float) -> None:
        """Fail when rows were not extracted, or when more are refused than the policy allows.

        Raises:
            TooManyRefusedError: with the reasons and the way out.
        """
        if self.failures:
            first = next(iter(self.failures.items()))
            raise TooManyRefusedError(
                f"{len(self.failures):,} shards failed, shard {first[0]} with: {first[1]}. "
                f"`layertap failures {self.uri}` tells more{self._retry()}"
            )
        if not self.version.complete:
            raise TooManyRefusedError(
                f"version {self.version.number} is incomplete: {len(self.missing):,} of {self.num_rows:,} "
                "rows are missing, not all of them refused. Start the same run again: only what is missing "
                "is computed"
            )
        check_refused(self.missing, self.num_rows, max_refused_share, self._way_out())

    def _way_out(self) -> str:
        """What to do about missing rows, and what shows them."""
        is_dataset = len(self.missing) > (self.version.num_without_memory or 0)
        ways = [
            self._about_memory(),
            "Mend the dataset, or raise max_refused_share." if is_dataset else "Or raise max_refused_share.",
            f"{self._look()} shows more of them, {self.uri}/{self.missing_rows} holds all.",
        ]
        return " ".join(filter(None, ways))

    def _about_memory(self) -> str:
        """What helps rows that a GPU had no memory for; empty if there are none."""
        if not self.version.num_without_memory:
            return ""
        return (
            f"For {self.version.num_without_memory:,} of them a GPU had no memory, and the next run tries "
            "them again: start it where a GPU has more, or in a root of its own with a smaller max_length."
        )

    def _look(self) -> str:
        """The command that shows the missing rows."""
        return f"`layertap inspect {shlex.quote(self.uri)} --version {self.version.number}`"

    def _retry(self) -> str:
        """What to do about shards that failed, unless each of them says it."""
        if all(map(says_way_out, self.failures.values())):
            return ""
        return ". Press Retry, or start the same run again: only what is missing is computed"

    def __str__(self) -> str:
        num_stored = self.num_rows - len(self.missing)
        return (
            f"{num_stored:,} of {self.num_rows:,} rows are stored, {len(self.missing):,} are missing: "
            f"version {self.version.number} of {self.uri}; {self.work}"
        )

    def markdown(self) -> str:
        """The report for a person."""
        version = self.version
        kind = "complete" if version.complete else "incomplete"
        lines = [
            f"**{version.num_stored:,} of {self.num_rows:,} rows** are stored in version {version.number} "
            f"({kind}): {version.num_tokens:,} tokens.",
            "",
            f"{self.work}.",
            "",
            "```python",
            f'HiddenStates("{self.uri}", version={version.number})',
            "```",
        ]
        if self.shard_table:
            lines += ["", f"Each shard, with its lane and its times: {self.uri}/{self.shard_table}"]
        if self.failures:
            lines += ["", *_table(("shard", "last error"), self.failures), ""]
            lines += [f"More of them: `layertap failures {self.uri}`{self._retry()}."]
        if self.missing:
            lines += ["", *_table(("row", "why it is missing"), self.missing)]
            lines += ["", f"All {len(self.missing):,}, with their ids: {self.uri}/{self.missing_rows}."]
            lines += [f"To look at them: {self._look()}. {self._about_memory()}".rstrip()]
        return "\n".join(lines)


def _table(heads: Iterable[str], cells: Mapping[int, str]) -> list[str]:
    """A Markdown table of the first rows; a cell is the first line of its text."""
    rows = [
        (str(k), text.splitlines()[0].replace("|", "\\|")) for k, text in list(cells.items())[:MAX_TABLE_ROWS]
    ]
    return [f"| {' | '.join(row)} |" for row in (tuple(heads), ("---", "---"), *rows)]
