"""Everything layertap raises on purpose.

    LayertapError
    ├── InputError             the user's input is wrong: never retried
    │   ├── DatasetError       the dataset can't be read as asked
    │   ├── SpecError          layer ids, dtype, norm, length or budget make no sense
    │   ├── TargetError        the target can't be loaded or tapped
    │   └── TemplateError      the chat template gives no loss mask
    ├── StoreError             the object store failed for now: worth another try
    │   ├── NotFoundError      no such object
    │   ├── AlreadyExistsError create-once lost: somebody wrote this key first
    │   └── StoreRefusedError  forbidden, no bucket, quota, no space: never retried
    ├── CatalogError           what the root holds forbids the operation
    │   ├── MissingRowError    a row of the dataset isn't stored; says why
    │   ├── SpecMismatchError  the root belongs to another extraction
    │   └── FormatError        written by a newer format than this version reads
    ├── IntegrityError         bytes read back aren't the bytes that were written
    ├── EndpointError          a model server can't be asked
    │   └── TooLongError       it takes no prompt as long as this row
    ├── FidelityError          stored states aren't those of the served model
    ├── DeviceError            this host's GPU isn't there for this lane alone, or has no room for it
    ├── HostError              this host lacks the memory or the disk that a lane takes
    ├── SelfCheckError         the target computes something else than it should
    ├── ClaimLostError         another lane owns the shard by now
    ├── StoppedError           the run was told to stop
    ├── NotReadyError          checks before work found several things at once
    └── TooManyRefusedError    more rows are missing than the policy allows

Foreign exceptions are mapped once, in the module that calls the foreign library.
"""

from collections.abc import Sequence


class LayertapError(Exception):
    """Base of every error raised on purpose."""

    retriable = False


class InputError(LayertapError):
    """The user's input is wrong; the message names the value and the way out."""


class DatasetError(InputError):
    """The dataset can't be read as asked."""


class SpecError(InputError):
    """The specification of the extraction makes no sense for this target."""


class TargetError(InputError):
    """The target can't be loaded or tapped."""


class TemplateError(InputError):
    """The chat template can't tell the assistant's tokens from the others."""


class StoreError(LayertapError):
    """The object store failed; the same call may succeed later."""

    retriable = True


class NotFoundError(StoreError):
    """There is no such object."""

    retriable = False


class AlreadyExistsError(StoreError):
    """A create-once put found the object there."""

    retriable = False


class StoreRefusedError(StoreError):
    """The store refuses for good: forbidden, no bucket, no space."""

    retriable = False


class CatalogError(LayertapError):
    """What the root holds forbids the operation."""


class MissingRowError(CatalogError):
    """A row of the dataset isn't stored."""


class SpecMismatchError(CatalogError):
    """The root belongs to another extraction."""


class FormatError(CatalogError):
    """The root was written by a newer major format."""


class IntegrityError(LayertapError):
    """Bytes read back differ from the bytes that were written."""

    retriable = True


class EndpointError(LayertapError):
    """A model server doesn't answer, or not in a form that is understood."""


class TooLongError(EndpointError):
    """A model server takes no prompt as long as this row."""


class FidelityError(LayertapError):
    """The stored states aren't those of the model that is served."""


class DeviceError(LayertapError):
    """This host's GPU isn't there for this lane alone, or has no room for it."""


class HostError(LayertapError):
    """This host lacks the memory or the disk that a lane takes."""


class SelfCheckError(LayertapError):
    """The target computes something else than it should."""


class ClaimLostError(LayertapError):
    """Another lane owns the shard by now; its outcome stands."""


class StoppedError(LayertapError):
    """The run was told to stop."""


class NotReadyError(LayertapError):
    """Checks before work found several things; all of them are in the message."""

    def __init__(self, message: str, findings: Sequence[LayertapError] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class TooManyRefusedError(LayertapError):
    """More rows are missing than the policy allows."""


def is_store_wide(error: BaseException) -> bool:
    """Whether the store as a whole is at fault (away, forbidden, full), and so neither a shard nor a lane."""
    return isinstance(error, StoreRefusedError) or type(error) is StoreError


def is_retriable(error: BaseException) -> bool:
    """Whether another try of the same shard may succeed.

    Errors raised on purpose say it themselves; a foreign one (a CUDA error, a bug) gets another try,
    because it costs a shard's minutes while giving up costs its rows. What the store itself has tried for
    long enough gets none.
    """
    if is_store_wide(error):
        return False
    if isinstance(error, LayertapError):
        return error.retriable
    return isinstance(error, Exception)
