"""The header of a batch file in a root: what its states are, without reading them."""

import struct

from layertap.errors import IntegrityError
from layertap.store import Store


def read_header(store: Store, path: str, size: int) -> bytes:
    """The JSON of the header of a safetensors file of `size` bytes.

    Raises:
        NotFoundError: there is no such object.
        IntegrityError: it isn't a safetensors file.
    """
    (length,) = struct.unpack("<Q", store.get_range(path, 0, 8))
    if not 0 < length <= size - 8:
        raise IntegrityError(
            f"{store.uri}/{path} is no safetensors file: a header of {length:,} bytes doesn't fit into its "
            f"{size:,}"
        )
    return bytes(store.get_range(path, 8, length))
