"""What is extracted: the identity of a root, and nothing that may change between runs on it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from layertap.errors import SpecError

FORMAT_VERSION = "1.0"
"""Version of everything a root holds; readers refuse a newer major number."""

DTypeName = Literal["bfloat16", "float16", "float32"]
LastHiddenState = Literal["pre_norm", "post_norm", "none"]

ITEM_BYTES: Mapping[DTypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class ExtractionSpec:
    """What is computed for each row. Two roots with one fingerprint hold interchangeable hidden states.

    Raises:
        SpecError: a field is out of its range or of another type, or layer ids repeat.
    """

    target_identity: str
    """`hub:<repo>@<commit>` or `folder:<hash of the config and weight files>`."""

    layer_ids: tuple[int, ...]
    """0-based decoder-layer outputs, ascending: id k is the output of decoder layer k, as in DFlash
    checkpoints' `target_layer_ids` (Hugging Face `hidden_states[k + 1]`)."""

    last_hidden_state: LastHiddenState = "pre_norm"
    """The last decoder layer's output before the final norm, after it, or not stored."""

    dtype: DTypeName = "bfloat16"
    """Dtype of the target's weights and of the stored states."""

    max_length: int = 4096
    """Tokens of a row that are kept; longer rows are truncated or refused, by the run's policy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        if self.dtype not in ITEM_BYTES:
            raise SpecError(f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if self.last_hidden_state not in get_args(LastHiddenState):
            choices = ", ".join(get_args(LastHiddenState))
            raise SpecError(f"last_hidden_state {self.last_hidden_state!r} is not one of {choices}")
        if type(self.max_length) is not int:
            raise SpecError(f"max_length is {self.max_length!r}; it must be an integer")
        if self.max_length < 1:
            raise SpecError(f"max_length is {self.max_length}; it must be at least 1")
        if not self.layer_ids:
            raise SpecError(
                "no layer ids: give at least one, or a drafter's config.json with target_layer_ids"
            )
        if any(type(k) is not int for k in self.layer_ids):  # True would count as layer 1
            raise SpecError(f"layer ids {list(self.layer_ids)} must be integers")
        if list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise SpecError(f"layer ids {list(self.layer_ids)} must be ascending and without repeats")

    def check_against(self, num_hidden_layers: int) -> None:
        """Refuse layer ids that a target of `num_hidden_layers` decoder layers doesn't have."""
        wrong = [k for k in self.layer_ids if not 0 <= k < num_hidden_layers]
        if wrong:
            raise SpecError(
                f"layer ids {wrong} are out of range: this target has decoder layers 0 to "
                f"{num_hidden_layers - 1}. Ids of vLLM and speculators are one higher than layertap's."
            )

    @property
    def stores_last(self) -> bool:
        """Whether `last_hidden_state` is stored."""
        return self.last_hidden_state != "none"

    @property
    def num_states(self) -> int:
        """Hidden states stored for a token: the layers, and the last one if asked for."""
        return len(self.layer_ids) + self.stores_last

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of a stored state."""
        return ITEM_BYTES[self.dtype]

    def bytes_per_token(self, hidden_size: int) -> int:
        """Bytes of the stored states of one token, its int32 id included."""
        return self.num_states * hidden_size * self.item_bytes + 4

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name this extraction."""
        payload = {"format": FORMAT_VERSION.split(".")[0], **self.to_dict()}
        text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "layer_ids": list(self.layer_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ExtractionSpec":
        """The inverse of `to_dict`."""
        return cls(**{f.name: values[f.name] for f in fields(cls)})

    def differences(self, other: "ExtractionSpec") -> list[str]:
        """One phrase for each field in which `other` differs."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [f"{k}: {mine[k]!r} here, {theirs[k]!r} asked" for k in mine if mine[k] != theirs[k]]
