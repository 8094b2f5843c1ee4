"""What is known of how well a version's states agree with the model that is served.

Each check is `versions/<n>.served-<k>.json`, k = 1, 2, …, created once; the newest one counts.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

from layertap.errors import AlreadyExistsError, NotFoundError
from layertap.records import check_format, known_fields, to_json
from layertap.spec import FORMAT_VERSION
from layertap.store import Store
from layertap.told import read_told

RECORD = re.compile(r"versions/([1-9][0-9]*)\.served-([1-9][0-9]*)\.json")

NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """One check of a version against a model server."""

    version: int

    endpoint: str
    """Scheme, host and port."""

    model: str
    """The served model's name."""

    api: str
    """`vllm` or `sglang`: whose API gave the log probabilities."""

    num_rows: int
    num_tokens: int
    """Rows asked about, and supervised tokens of them."""

    agreement: float
    """Share of the tokens at which both find the same token most probable."""

    mean_abs_logprob_difference: float
    """Mean over the tokens of the absolute difference of their log probabilities, in nats."""

    min_agreement: float
    """What had to be reached."""

    created_at: str

    num_too_long: int = 0
    """Rows left out because the server takes none as long."""

    refusal: str = ""
    """What the server said of the first of them; empty without any."""

    format_version: str = FORMAT_VERSION

    @property
    def passed(self) -> bool:
        """Whether the states are those of the served model."""
        return self.agreement >= self.min_agreement

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{'passed' if self.passed else 'FAILED'}: top-1 agreement {self.agreement:.4f}, mean "
            f"|Δ logprob| {self.mean_abs_logprob_difference:.4f} on {self.num_tokens:,} tokens "
            f"with {self.model}{self._left_out}"
        )

    @property
    def _left_out(self) -> str:
        if not self.num_too_long:
            return ""
        return f"; rows left out as too long for the server: {self.num_too_long} ({self.refusal})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`; fields of newer minor formats are ignored.

        Raises:
            FormatError: written by a newer major format.
        """
        check_format("a check of served fidelity", values["format_version"])
        return cls(**known_fields(cls, {"num_too_long": 0, "refusal": "", **values}))


def record(store: Store, found: Fidelity) -> str:
    """Write a check down beside its version; returns the path."""
    while True:
        path = f"versions/{found.version}.served-{max(_numbers(store, found.version), default=0) + 1}.json"
        with suppress(AlreadyExistsError):
            store.create(path, to_json(asdict(found)))
            return path


def latest(store: Store, version: int) -> Fidelity | None:
    """The newest check of a version, or None: not checked, or pruned since. Damaged ones are passed over."""
    for number in sorted(_numbers(store, version), reverse=True):
        with suppress(NotFoundError):
            found = read_told(store, f"versions/{version}.served-{number}.json", Fidelity.from_dict)
            if found is not None:
                return found
    return None


def _numbers(store: Store, version: int) -> list[int]:
    found = [RECORD.fullmatch(info.path) for info in store.list("versions")]
    return [int(match[2]) for match in found if match and int(match[1]) == version]
