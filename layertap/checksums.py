"""CRC64NVME, the checksum that S3 computes too: of bytes, and of bytes whose parts' are known."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

Buffer = bytes | bytearray | memoryview

CHUNK_BYTES = 32 << 20
"""What is read of a file at a time."""


@dataclass(frozen=True)
class Content:
    """Size and CRC64NVME of what was sent to a store, or of what it says it has."""

    nbytes: int = 0

    crc: int | None = 0
    """None where the store keeps none."""

    def then(self, data: Buffer) -> Self:
        """The same of these bytes followed by `data`."""
        assert self.crc is not None
        return type(self)(self.nbytes + len(data), crc64nvme(data, self.crc))

    def confirms(self, sent: Self) -> bool:
        """Whether a store that says this has what was sent, as far as it tells."""
        return self.nbytes == sent.nbytes and self.crc in (None, sent.crc)

    def __str__(self) -> str:
        return f"{self.nbytes:,} bytes" + ("" if self.crc is None else f" of {checksum_text(self.crc)}")


def crc64nvme(data: Buffer, previous: int = 0) -> int:
    """The CRC64NVME of `data`, as S3 computes it; without the GIL.

    Args:
        data: the bytes.
        previous: the CRC64NVME of what comes before them.
    """
    from awscrt import checksums

    found: int = checksums.crc64nvme(data, previous)
    return found


def crc64nvme_of_all(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC64NVME of bytes of which the parts' are known; nothing is read again.

    Args:
        parts: CRC64NVME and number of bytes of each, in order; together all of the bytes.
    """
    from awscrt import checksums

    whole = 0
    for crc, nbytes in parts:
        whole = checksums.combine_crc64nvme(whole, crc, nbytes)
    return whole


def checksum(data: Buffer) -> str:
    """The CRC64NVME of `data` as `crc64nvme:<16 hex digits>`."""
    return checksum_text(crc64nvme(data))


def file_checksum(path: Path) -> str:
    """The `checksum` of a file, however large: read in chunks."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = crc64nvme(chunk, crc)
    return checksum_text(crc)


def checksum_text(crc: int) -> str:
    """A CRC64NVME as records hold it: `crc64nvme:<16 hex digits>`."""
    return f"crc64nvme:{crc:016x}"
