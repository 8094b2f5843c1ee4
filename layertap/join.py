"""Rows of two roots, found by their tokens; and of one that isn't in both, which root lacks it and why."""

import numpy as np
import pyarrow as pa

from layertap.epoch import Rows
from layertap.errors import SpecMismatchError
from layertap.keys import KEY_BYTES, key_array
from layertap.rows import StoredRows


def match(mine: StoredRows, theirs: StoredRows, their_missing: pa.Table) -> tuple[Rows, Rows, pa.Table]:
    """Rows that both roots have, and the others of `mine`.

    Args:
        mine: rows of the first root.
        theirs: rows of the second one, in any order.
        their_missing: what the second one lacks: `extraction_key` and, with the root's name, `reason`.

    Returns:
        Which rows of `mine` both have; which of `theirs` those are; and `row`, `extraction_key` and `reason`
        of all rows of the first root's dataset that aren't in both.

    Raises:
        SpecMismatchError: they are of different targets or dtypes.
    """
    _refuse_unlike(mine, theirs)
    reasons = dict(
        zip(*(their_missing[name].to_pylist() for name in ("extraction_key", "reason")), strict=True)
    )
    no_row = theirs.lacks("its dataset has no row of these tokens")
    not_mine = mine.missing_here
    keys = not_mine["extraction_key"].to_pylist()
    missing_keys = np.frombuffer(b"".join(key or bytes(KEY_BYTES) for key in keys), np.uint8)
    found = theirs.find(np.concatenate([mine.keys, missing_keys.reshape(-1, KEY_BYTES)]))
    at, in_theirs = found[: len(mine.keys)], found[len(mine.keys) :]
    lost = np.flatnonzero(at < 0)
    only_mine = pa.table(
        {
            "row": mine.numbers[lost],
            "extraction_key": key_array(mine.keys[lost]),
            "reason": pa.array([reasons.get(mine.keys[i].tobytes(), no_row) for i in lost], pa.string()),
        }
    )
    told = [
        f"{reason}; {reasons.get(key, no_row)}" if key and place < 0 else reason
        for key, place, reason in zip(keys, in_theirs, not_mine["reason"].to_pylist(), strict=True)
    ]
    not_mine = not_mine.set_column(2, "reason", pa.array(told, pa.string()))
    both = np.flatnonzero(at >= 0)
    return both, at[both], pa.concat_tables([only_mine, not_mine]).sort_by("row")


def _refuse_unlike(mine: StoredRows, theirs: StoredRows) -> None:
    for name in ("target_identity", "dtype"):
        if getattr(mine.spec, name) != getattr(theirs.spec, name):
            raise SpecMismatchError(
                f"{mine.store.uri} and {theirs.store.uri} can't be joined: {name} is "
                f"{getattr(mine.spec, name)!r} in one and {getattr(theirs.spec, name)!r} in the other"
            )
