"""The forms from which runs are started."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from flows import DEFAULT_STORAGE
from layertap.dataset import Columns
from layertap.errors import InputError
from layertap.plan import PlanSettings
from layertap.preview import RunSettings
from layertap.spec import DTypeName, LastHiddenState
from layertap.target_info import drafter_layer_ids

BLOCK = r"^(s3-bucket|local-file-system)/[a-z0-9-]+$"
ROOT = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"

EXAMPLES = {
    "root": "qwen3-8b/chats, a folder under the storage block",
    "storage": "s3-bucket/NAME",
    "out": "/data/tokens",
}
"""What the values with a pattern look like."""


def _number_fields(schema: dict[str, Any]) -> None:
    """Let both UIs show the fields in our order: PostgreSQL keeps a schema's by the length of their names."""
    for position, field in enumerate(schema["properties"].values()):
        field["position"] = position


class Form(BaseModel):
    """What the forms share."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_number_fields)

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """The form with these values.

        Raises:
            InputError: one is out of its range.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError("; ".join(map(_told, error.errors()))) from error


class Advanced(Form):
    """What most runs leave as it is."""

    dtype: DTypeName = Field(default="bfloat16", description="Dtype of the weights and of what is stored.")
    revision: str = Field(default="", description="Hub revision of the target; empty for its main branch.")
    too_long: Literal["truncate", "refuse"] = Field(
        default="truncate", description="What happens to rows longer than max_length."
    )
    max_refused_share: float = Field(
        default=0.01, ge=0, le=1, description="Share of rows that may be missing before the run fails."
    )
    split: str = Field(default="", description="Split, if the dataset is a dictionary of splits.")
    input_ids_column: str = Field(default="input_ids", min_length=1, description="Column of token ids.")
    loss_mask_column: str = Field(
        default="loss_mask", min_length=1, description="Column of the loss mask, if any."
    )
    id_column: str = Field(default="id", min_length=1, description="Column of row ids, if any.")
    max_batch_tokens: int = Field(default=8192, ge=1, description="Rows of a batch times its longest row.")
    shard_tokens: int = Field(default=2_000_000, ge=1, description="Tokens of a shard, the unit of retries.")
    check_space: bool = Field(
        default=True, description="Refuse to begin when the root's disk has no room for all of it."
    )
    compiled: bool = Field(
        default=True, description="Compile the decoder layers on GPUs: a third faster after a minute's start."
    )
    strict_kernels: bool = Field(
        default=True, description="Fail rather than run on a GPU with transformers' slow reference code."
    )


LAYERS_OR_DRAFTER: dict[str, Any] = {
    "if": {"properties": {"drafter": {"const": ""}}},
    "then": {"required": ["layer_ids"], "properties": {"layer_ids": {"minItems": 1}}},
    "else": {"properties": {"layer_ids": {"maxItems": 0}}},
}
"""For the form, which then refuses at once what `Extraction` would refuse when the run starts."""

AsUsual = Annotated[None, WithJsonSchema({"type": "null", "title": "as usual"})]
"""The other choice beside a group, which is folded away while this one holds."""


def _refine(schema: dict[str, Any]) -> None:
    """Of a choice a server says only that no branch fits; a condition beside it names the field."""
    _number_fields(schema)
    schema.update(LAYERS_OR_DRAFTER)
    advanced = schema["properties"]["advanced"]
    advanced.update({"if": {"type": "object"}, "then": dict(advanced["anyOf"][1])})


class Extraction(Form):
    """What to extract, from what, and where to put it."""

    model_config = ConfigDict(json_schema_extra=_refine)

    target: str = Field(
        min_length=1, description="Target model: a hub id, or a folder that is there on every host."
    )
    dataset: str = Field(
        min_length=1,
        description="Tokenised dataset: a save_to_disk folder, a Parquet file or a folder of them; "
        "on the coordinator's host, or s3://bucket/prefix.",
    )
    layer_ids: list[Annotated[int, Field(ge=0)]] = Field(
        default=[],
        description="0-based decoder layers whose outputs are stored, ascending; or give a drafter.",
    )
    drafter: str = Field(
        default="", description="Folder of a drafter whose config.json names the layers (target_layer_ids)."
    )
    root: str = Field(
        pattern=ROOT,
        description="Folder under the storage block for what is extracted, such as qwen3-8b/chats. Another "
        "target, other layers, another dtype or maximum length need another one.",
    )
    storage: str = Field(
        default=DEFAULT_STORAGE,
        pattern=BLOCK,
        description="Storage block to write to: s3-bucket/NAME or local-file-system/NAME.",
    )
    num_lanes: int = Field(default=1, ge=1, le=512, description="GPUs to use at most, a lane on each.")
    max_length: int = Field(default=4096, ge=1, description="Tokens kept of a row.")
    last_hidden_state: LastHiddenState = Field(
        default="pre_norm", description="The last layer's output before or after the final norm, or none."
    )
    advanced: AsUsual | Advanced = Field(default=None, description="What most runs leave as it is.")

    @model_validator(mode="after")
    def _names_layers_once(self) -> Self:
        if bool(self.layer_ids) == bool(self.drafter):
            raise ValueError("give either layer_ids, such as [1, 16, 31], or drafter with its config.json")
        if self.layer_ids != sorted(set(self.layer_ids)):
            raise ValueError(f"layer_ids {self.layer_ids} must be ascending and without repeats")
        return self

    @property
    def further(self) -> Advanced:
        """The advanced values, also where they are as usual."""
        return self.advanced or Advanced()

    @property
    def run_name(self) -> str:
        """What the run is called: root and dataset."""
        return f"{self.root} from {Path(self.dataset).name}"

    @property
    def tags(self) -> list[str]:
        """What the run and its lanes are found by."""
        return [f"root:{self.root}", f"dataset:{Path(self.dataset).name}", f"target:{Path(self.target).name}"]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The form from its values by name, wherever in the form they belong.

        Raises:
            InputError: a name isn't one of the form's, or a value is out of its range.
        """
        names = (cls.model_fields | Advanced.model_fields).keys() - {"advanced"}
        if strangers := values.keys() - names:
            raise InputError(
                f"the run form has no {' and no '.join(sorted(strangers))}; it has {', '.join(sorted(names))}"
            )
        advanced = {name: value for name, value in values.items() if name in Advanced.model_fields}
        plain = {name: value for name, value in values.items() if name not in advanced}
        return cls.checked({**plain, "advanced": Advanced.checked(advanced)})

    def settings(self) -> RunSettings:
        """The run that the form asks for.

        Raises:
            SpecError: the drafter names no layers.
        """
        more = self.further
        return RunSettings(
            dataset=self.dataset,
            target=self.target,
            layer_ids=tuple(self.layer_ids) or drafter_layer_ids(Path(self.drafter)),
            revision=more.revision or None,
            split=more.split or None,
            columns=Columns(
                input_ids=more.input_ids_column, loss_mask=more.loss_mask_column, row_id=more.id_column
            ),
            last_hidden_state=self.last_hidden_state,
            dtype=more.dtype,
            max_length=self.max_length,
            too_long=more.too_long,
            plan=PlanSettings(max_batch_tokens=more.max_batch_tokens, shard_tokens=more.shard_tokens),
            max_refused_share=more.max_refused_share,
            check_space=more.check_space,
        )


def _told(error: Mapping[str, Any]) -> str:
    """A validation error as its field, the value, and what is wrong with it."""
    field = ".".join(map(str, error["loc"]))
    if error["type"] == "string_pattern_mismatch":
        return f"{field} {error['input']!r} is not like {EXAMPLES[field]}"
    return (
        f"{field} {error['input']!r}: {error['msg']}"
        if field
        else str(error["msg"]).removeprefix("Value error, ")
    )


class OnRoot(Form):
    """A root that a run has filled."""

    root: str = Field(pattern=ROOT, description="Folder under the storage block of what was extracted.")
    storage: str = Field(
        default=DEFAULT_STORAGE,
        pattern=BLOCK,
        description="Storage block it lies in: s3-bucket/NAME or local-file-system/NAME.",
    )


class Again(OnRoot):
    """A root on which the last run is to be asked for again."""

    num_lanes: int = Field(
        default=0, ge=0, le=512, description="GPUs to use at most; 0 for as many as before."
    )


class Retry(Again):
    """A root whose last run is to be finished."""

    shards: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="Failed shards to try again; all of them if none is given."
    )

    @property
    def run_name(self) -> str:
        """What the run is called."""
        return f"{self.root} again"


class Reextraction(Again):
    """A root to be kept up with its dataset."""

    dataset: str = Field(default="", description="Dataset to read from now on; empty for the last run's.")
    still_s: int = Field(
        default=60,
        ge=0,
        description="Seconds for which the dataset's files must not change before it is read.",
    )

    @property
    def run_name(self) -> str:
        """What the run is called."""
        return f"{self.root} if changed"


class Preparation(Form):
    """Which chats to tokenise, and how."""

    source: str = Field(min_length=1, description='JSONL of chats, one {"messages": […], "id": …} a line.')
    out: str = Field(
        pattern=r"^/",
        description="New folder for the dataset, on the coordinator's host: /data/tokens.",
    )
    tokenizer: str = Field(min_length=1, description="Tokenizer of the target: a hub id or a folder.")
    revision: str = Field(default="", description="Hub revision of the tokenizer; empty for its main branch.")
    template: str = Field(
        default="",
        description="Chat template file instead of the tokenizer's, or chatml for the shipped one.",
    )
    template_arguments: dict[str, Any] = Field(
        default={}, description='Arguments of the template, such as {"enable_thinking": false}.'
    )
    max_length: int = Field(default=0, ge=0, description="Tokens kept of a chat; 0 keeps all.")
    responses: str = Field(default="unknown", description="Who wrote the responses.")


class Verification(OnRoot):
    """Which root to read back, and how much of it."""

    num_rows: int = Field(default=1000, ge=0, description="Rows to read, drawn at random; 0 reads all.")
    target: str = Field(
        default="",
        description="Target to compute some rows again on, a hub id or a folder; empty computes none.",
    )
    revision: str = Field(default="", description="Hub revision of the target; empty for its main branch.")
    num_recomputed: int = Field(default=8, ge=1, description="Rows to compute again.")
