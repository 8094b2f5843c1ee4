"""What a failure of obstore, boto3 or the file system means: try again, never, or no such object."""

import contextlib
import re
from collections.abc import Iterator

from obstore import exceptions as obstore_errors

from layertap.errors import AlreadyExistsError, NotFoundError, StoreError, StoreRefusedError

EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
REFUSED_CODES = {
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "InvalidAccessKeyId",
    "InvalidBucketName",
    "NoSuchBucket",
    "QuotaExceeded",
    "SignatureDoesNotMatch",
    "XMinioStorageFull",
}
REFUSED_PHRASES = (
    "Disk quota exceeded",
    "No space left on device",
    "Not a directory",
    "Permission denied",
    "Read-only file system",
    "507 Insufficient Storage",
)


@contextlib.contextmanager
def mapped(verb: str, what: str) -> Iterator[None]:
    """Turn errors of obstore, boto3 and the file system into layertap's."""
    try:
        yield
    except (obstore_errors.BaseError, OSError) as error:
        raise _translated(verb, what, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("boto3", "botocore"):
            raise
        raise _translated(verb, what, error) from error


def _translated(verb: str, what: str, error: Exception) -> StoreError:
    text = str(error)
    found = re.search(r"<Code>(\w+)</Code>|An error occurred \((\w+)\)", text)
    code = (found[1] or found[2]) if found else None
    message = f"can't {verb} {what}: {text.partition(chr(10))[0]}" + (f" [{code}]" if code else "")
    if isinstance(error, obstore_errors.AlreadyExistsError | obstore_errors.PreconditionError):
        return AlreadyExistsError(message)
    if code in EXPIRED_CODES:
        return StoreError(message)
    if code in REFUSED_CODES or any(phrase in text for phrase in REFUSED_PHRASES):
        return StoreRefusedError(message)
    if isinstance(error, obstore_errors.PermissionDeniedError | obstore_errors.UnauthenticatedError):
        return StoreRefusedError(message)
    if isinstance(error, FileNotFoundError) or code == "NoSuchKey":
        return NotFoundError(message)
    return StoreError(message)
