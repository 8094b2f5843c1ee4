"""What a failure of obstore, boto3 or the file system means: try again, never, or no such object.

The body of a store's answer can hold an access key id and the request that was signed. So what is raised here
says the error's code and first sentence, and never has the original as its cause.
"""

import contextlib
import re
from collections.abc import Iterator

from obstore import exceptions as obstore_errors

from layertap.errors import (
    AlreadyExistsError,
    IntegrityError,
    LayertapError,
    NotFoundError,
    StoreError,
    StoreRefusedError,
)

EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
EXPIRED = re.compile(rf"[>(\[](?:{'|'.join(EXPIRED_CODES)})\b")
"""In what obstore or boto3 says, or layertap, of the store or of who gives the credentials of a role."""

CONFLICT_CODES = {"ConditionalRequestConflict", "OperationAborted"}
"""AWS's answers where others create the same object just now: whether one of them did, the next try shows."""

OF_CREDENTIALS = re.compile(
    r"status code: 40[013] [\w ]+: *\n|An error occurred \(40[013]\)"
    r"|[>(\[](?:InvalidAccessKeyId|InvalidClientTokenId|InvalidToken|SignatureDoesNotMatch)\b"
)
"""Refusals that other credentials may mend: of keys that were replaced; and those without a body, as of a
HEAD, which don't say why."""

REFUSED_CODES = {
    "403",
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "InvalidAccessKeyId",
    "InvalidBucketName",
    "NoSuchBucket",
    "NotImplemented",
    "QuotaExceeded",
    "SignatureDoesNotMatch",
    "XMinioAdminBucketQuotaExceeded",
    "XMinioStorageFull",
}
REFUSED_PHRASES = (
    "Disk quota exceeded",
    "No space left on device",
    "Not a directory",
    "Operation not permitted",
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
        raise _translated(verb, what, error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("boto3", "botocore"):
            raise
        raise _translated(verb, what, error) from None


def _translated(verb: str, what: str, error: Exception) -> LayertapError:
    text = str(error)
    found = re.search(r"<Code>(\w+)</Code>|An error occurred \((\w+)\)|\(code: (\w+)\)", text)
    code = found[found.lastindex or 0] if found else None
    sentence = re.split(r"[<\n]|\.\s", text, maxsplit=1)[0].rstrip(" :") or type(error).__name__
    message = f"can't {verb} {what}: {sentence}" + (f" [{code}]" if code else "")
    if code in EXPIRED_CODES | CONFLICT_CODES:
        return StoreError(message)
    if code == "InvalidRange":
        return IntegrityError(message)
    if isinstance(error, obstore_errors.AlreadyExistsError | obstore_errors.PreconditionError):
        return AlreadyExistsError(message)
    if code in REFUSED_CODES or any(phrase in text for phrase in REFUSED_PHRASES):
        return StoreRefusedError(message)
    if isinstance(error, obstore_errors.PermissionDeniedError | obstore_errors.UnauthenticatedError):
        return StoreRefusedError(message)
    if isinstance(error, FileNotFoundError) or code in ("404", "NoSuchKey"):
        return NotFoundError(message)
    return StoreError(message)
