"""Extraction keys: by what a row is known in a root, and sets of them as arrays and as Arrow."""

from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from layertap.checksums import Buffer

KEY_BYTES = 16
"""Bytes of an extraction key."""


def extraction_key(token_ids: Buffer) -> bytes:
    """The key of a row, the blake2b of 16 bytes of what the target reads of it.

    Args:
        token_ids: bytes of the truncated ids as little-endian int32.
    """
    return blake2b(token_ids, digest_size=KEY_BYTES).digest()


def key_array(keys: NDArray[np.uint8], valid: NDArray[np.bool_] | None = None) -> "pa.Array[Any]":
    """Extraction keys [n, 16] as an Arrow array of fixed_size_binary(16), null where not `valid`."""
    mask = None if valid is None else pa.array(valid).buffers()[1]
    data = pa.py_buffer(np.ascontiguousarray(keys).data)
    return pa.Array.from_buffers(pa.binary(KEY_BYTES), len(keys), [mask, data])


def keys_of(array: Any) -> NDArray[np.uint8]:
    """The inverse of `key_array`: [n, 16]; whatever bytes lie there where null."""
    data = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    return data[array.offset * KEY_BYTES : (array.offset + len(array)) * KEY_BYTES].reshape(-1, KEY_BYTES)


def sortable(keys: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """[n, 16] keys as [n] values that numpy compares and sorts, exactly, for all have 16 bytes."""
    return np.ascontiguousarray(keys).view(f"S{KEY_BYTES}").ravel()


def find_keys(keys: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> NDArray[np.int64]:
    """[n] index among the ascending keys [m, 16] of each of the wanted ones [n, 16], -1 if it isn't there."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    mine, theirs = sortable(keys), sortable(wanted)
    at = np.minimum(np.searchsorted(mine, theirs), len(mine) - 1)
    return np.where(mine[at] == theirs, at, -1)


def keys_xor(keys: NDArray[np.uint8]) -> str:
    """XOR of extraction keys [n, 16] as 32 hex digits: with the count, a fingerprint of their set."""
    xor: NDArray[np.uint8] = np.bitwise_xor.reduce(keys, axis=0, initial=0)
    return xor.tobytes().hex()
