"""How the files of a trainer hold rows. No trainer is imported.

A layout names all its files beforehand, with their sizes, and writes each of them whole, in any order.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from layertap.folder import replacing
from layertap.trainers.rows import Needs, TrainerRow, TrainerRows
from layertap.trainers.tokens import save_dataset_metadata, write_tokens

Algorithm = Literal["eagle3", "dflash", "domino", "dspark"]

SPECULATORS_NEEDS = Needs(trainer="speculators", last="pre_norm")

SPECFORGE_NEEDS: Mapping[Algorithm, Needs] = {
    "eagle3": Needs(trainer="SpecForge's EAGLE-3", last="post_norm", num_layers=3),
    "dflash": Needs(trainer="SpecForge's DFlash", last=None, wants_pair=True),
    "domino": Needs(trainer="SpecForge's Domino", last=None, wants_pair=True),
    "dspark": Needs(trainer="SpecForge's DSpark", last="post_norm", wants_pair=True),
}

MODELOPT_NEEDS = Needs(trainer="ModelOpt", last="post_norm")

FILE_OVERHEAD_BYTES = 4096
"""What a file's headers add to its tensors, and the disk's last block; about."""

ROWS_PER_FOLDER = 2000

TOKENS = "data-00000-of-00001.arrow"

PIN = "layertap.json"
"""In a data folder of speculators: the root and version of its rows."""


@dataclass(frozen=True, kw_only=True)
class OutFile:
    """One file of an export."""

    name: str
    """Relative to the export's folder."""

    nbytes: int
    """About; never less than it takes."""

    rows: range = range(0)
    """The rows it holds, if it holds states."""


class Layout(ABC):
    """Files of one trainer."""

    needs: Needs

    @abstractmethod
    def files(self, rows: TrainerRows) -> Iterator[OutFile]:
        """All files but those of `finish`."""

    @abstractmethod
    def write(self, rows: TrainerRows, file: OutFile, path: Path) -> None:
        """Write one of `files` to `path`."""

    def finish(self, rows: TrainerRows, folder: Path) -> None:
        """Write the small files without which the trainer doesn't take the others; each whole or not."""
        return


class RowFiles(Layout):
    """A file for each row, `ROWS_PER_FOLDER` to a folder, numbered so that sorted names are in row order."""

    suffix: str

    @abstractmethod
    def tensors(self, row: TrainerRow) -> dict[str, Any]:
        """What the file of a row holds."""

    def name(self, i: int) -> str:
        """Where the i-th row goes."""
        first = i - i % ROWS_PER_FOLDER
        return f"rows_{first:08d}-{first + ROWS_PER_FOLDER:08d}/data_{i:08d}{self.suffix}"

    def files(self, rows: TrainerRows) -> Iterator[OutFile]:
        """One for each row."""
        num_states = len(rows.states.layer_ids) + (self.needs.last is not None)
        token_bytes = num_states * rows.states.hidden_size * rows.states.spec.item_bytes + 16
        for i, num_tokens in enumerate(rows.num_tokens.tolist()):
            nbytes = num_tokens * token_bytes + FILE_OVERHEAD_BYTES
            yield OutFile(name=self.name(i), nbytes=nbytes, rows=range(i, i + 1))

    def write(self, rows: TrainerRows, file: OutFile, path: Path) -> None:
        """A dictionary of tensors that `torch.load(…, weights_only=True)` reads."""
        values = self.tensors(rows[file.rows[0]])
        # of a view torch would write all that lies behind it: the whole row
        owned = {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}
        torch.save(owned, path)


def speculators_tensors(row: TrainerRow) -> dict[str, Tensor]:
    """`hidden_states` [T, L + 1, H], the last state behind the layers, and `token_ids` int64 [T]."""
    assert row.last is not None
    hidden_states = torch.cat([row.layers, row.last[:, None]], dim=1)
    return {"hidden_states": hidden_states, "token_ids": row.input_ids}


class SpeculatorsFiles(RowFiles):
    """`hidden_states/hs_<row>.safetensors`, and a folder of `datasets.save_to_disk` with tokens and masks."""

    needs = SPECULATORS_NEEDS

    def __init__(self, *, tokens_only: bool = False) -> None:
        self.tokens_only = tokens_only

    def name(self, i: int) -> str:
        """The only name that speculators looks for."""
        return f"hidden_states/hs_{i}.safetensors"

    def tensors(self, row: TrainerRow) -> dict[str, Any]:
        """The payload that its transfers hand on."""
        return speculators_tensors(row)

    def files(self, rows: TrainerRows) -> Iterator[OutFile]:
        """The states, unless they are read from the root, and the tokens."""
        if not self.tokens_only:
            yield from super().files(rows)
        num_tokens = int(rows.num_tokens.sum(dtype=np.int64))
        yield OutFile(name=TOKENS, nbytes=16 * num_tokens + 64 * len(rows) + FILE_OVERHEAD_BYTES)

    def write(self, rows: TrainerRows, file: OutFile, path: Path) -> None:
        """A file of states, or the one of tokens."""
        if file.name == TOKENS:
            write_tokens(rows, path)
        else:
            save_file(self.tensors(rows[file.rows[0]]), path)

    def finish(self, rows: TrainerRows, folder: Path) -> None:
        """What makes the folder one of `datasets`, and where the states lie."""
        version = rows.states.version
        save_dataset_metadata(folder, TOKENS, fingerprint=version.content[:16])
        write_json(
            folder / PIN,
            {"root": rows.states.store.uri, "version": version.number, "content": version.content},
        )


def specforge_tensors(row: TrainerRow, algorithm: Algorithm) -> dict[str, Tensor]:
    """What SpecForge's offline reader asks for, by algorithm."""
    tensors = {"input_ids": row.input_ids, "loss_mask": row.loss_mask}
    flat = row.layers.flatten(1)[None]
    last = None if row.last is None else row.last[None]
    if algorithm == "eagle3":
        assert last is not None
        return {**tensors, "hidden_state": last, "aux_hidden_state": flat}
    if last is not None:
        return {**tensors, "hidden_states": flat, "target_last_hidden_states": last}
    return {**tensors, "hidden_states": flat}


class SpecForgeFiles(RowFiles):
    """`rows_…/data_….ckpt`, which its reader finds and sorts.

    Args:
        algorithm: which of SpecForge's algorithms is trained.
        max_length: tokens at which the training config has rows cut; rows of which nothing to train on would
            be left are left out.
    """

    suffix = ".ckpt"

    def __init__(self, algorithm: Algorithm, *, max_length: int | None = None) -> None:
        self.algorithm = algorithm
        self.needs = replace(SPECFORGE_NEEDS[algorithm], max_tokens=max_length)

    def tensors(self, row: TrainerRow) -> dict[str, Any]:
        """The features of the algorithm."""
        return dict(specforge_tensors(row, self.algorithm))


class ModelOptFiles(RowFiles):
    """`rows_…/data_….pt`."""

    suffix = ".pt"
    needs = MODELOPT_NEEDS

    def tensors(self, row: TrainerRow) -> dict[str, Any]:
        """A dump with a loss mask and a last state after the norm."""
        return {
            "input_ids": row.input_ids,
            "hidden_states": row.last,
            "aux_hidden_states": row.layers.flatten(1),
            "loss_mask": row.loss_mask,
            "hidden_states_prenorm": False,
        }


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a small file whole."""
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=2))
