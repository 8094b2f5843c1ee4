"""The forms from which runs are started."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from layertap.coordinator import RunSettings
from layertap.dataset import Columns
from layertap.plan import PlanSettings
from layertap.spec import DTypeName, LastHiddenState
from layertap.target_info import drafter_layer_ids

BLOCK = r"^(s3-bucket|local-file-system)/[a-z0-9-]+$"
ROOT = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"


class Extraction(BaseModel):
    """What to extract, from what, and where to put it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(
        min_length=1, description="Target model: a hub id, or a folder that is there on every host."
    )
    dataset: str = Field(
        min_length=1,
        description="Tokenised dataset: a save_to_disk folder, a Parquet file or a folder of them.",
    )
    root: str = Field(
        pattern=ROOT,
        description="Folder under the storage block for what is extracted. Another target, other layers, "
        "another dtype or maximum length need another one.",
    )
    storage: str = Field(
        default="s3-bucket/layertap",
        pattern=BLOCK,
        description="Storage block to write to: s3-bucket/NAME or local-file-system/NAME.",
    )
    layer_ids: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="0-based decoder layers whose outputs are stored; or give a drafter."
    )
    drafter: str = Field(
        default="", description="Folder of a drafter whose config.json names the layers (target_layer_ids)."
    )
    last_hidden_state: LastHiddenState = Field(
        default="pre_norm", description="The last layer's output before or after the final norm, or none."
    )
    dtype: DTypeName = Field(default="bfloat16", description="Dtype of the weights and of what is stored.")
    revision: str = Field(default="", description="Hub revision of the target; empty for its main branch.")
    max_length: int = Field(default=4096, ge=1, description="Tokens kept of a row.")
    too_long: Literal["truncate", "refuse"] = Field(
        default="truncate", description="What happens to rows longer than that."
    )
    num_lanes: int = Field(default=1, ge=1, le=512, description="GPUs to use at most, a lane on each.")
    max_refused_share: float = Field(
        default=0.01, ge=0, le=1, description="Share of rows that may be missing before the run fails."
    )
    split: str = Field(default="", description="Split, if the dataset is a dictionary of splits.")
    input_ids_column: str = Field(default="input_ids", description="Column of token ids.")
    loss_mask_column: str = Field(default="loss_mask", description="Column of the loss mask, if any.")
    id_column: str = Field(default="id", description="Column of row ids, if any.")
    max_batch_tokens: int = Field(default=8192, ge=1, description="Rows of a batch times its longest row.")
    shard_tokens: int = Field(default=2_000_000, ge=1, description="Tokens of a shard, the unit of retries.")

    @model_validator(mode="after")
    def _names_layers_once(self) -> Self:
        if bool(self.layer_ids) == bool(self.drafter):
            raise ValueError("give either layer_ids, such as [1, 16, 31], or drafter with its config.json")
        if self.layer_ids != sorted(set(self.layer_ids)):
            raise ValueError(f"layer_ids {self.layer_ids} must be ascending and without repeats")
        return self

    def settings(self) -> RunSettings:
        """The run that the form asks for.

        Raises:
            SpecError: the drafter names no layers.
        """
        return RunSettings(
            dataset=self.dataset,
            target=self.target,
            layer_ids=tuple(self.layer_ids) or drafter_layer_ids(Path(self.drafter)),
            revision=self.revision or None,
            split=self.split or None,
            columns=Columns(
                input_ids=self.input_ids_column, loss_mask=self.loss_mask_column, row_id=self.id_column
            ),
            last_hidden_state=self.last_hidden_state,
            dtype=self.dtype,
            max_length=self.max_length,
            too_long=self.too_long,
            plan=PlanSettings(max_batch_tokens=self.max_batch_tokens, shard_tokens=self.shard_tokens),
            max_refused_share=self.max_refused_share,
        )


class Preparation(BaseModel):
    """Which chats to tokenise, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1, description='JSONL of chats, one {"messages": […], "id": …} a line.')
    out: str = Field(min_length=1, description="Folder for the dataset.")
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
