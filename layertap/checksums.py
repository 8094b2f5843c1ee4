"""CRC64NVME, the checksum that S3 computes too: of bytes, and of bytes whose parts' are known."""

from collections.abc import Iterable

Buffer = bytes | bytearray | memoryview


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


def checksum_text(crc: int) -> str:
    """A CRC64NVME as records hold it: `crc64nvme:<16 hex digits>`."""
    return f"crc64nvme:{crc:016x}"
