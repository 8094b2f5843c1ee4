"""speculators reads a root: `python -m layertap.trainers.speculators --hidden-states-backend layertap …`.

The arguments are those of `speculators train`. `--data-path` is a folder that `layertap export --to
speculators --tokens-only` wrote: the rows' tokens and masks, and which root and version hold their states.

speculators' layer ids are one higher than layertap's, and its last state is before the final norm, which it
applies itself.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from torch import Tensor

from layertap.errors import CatalogError
from layertap.trainers.layouts import PIN, SPECULATORS_NEEDS, speculators_tensors
from layertap.trainers.rows import TrainerRows, open_rows


class LayertapTransfer(HiddenStatesTransfer):
    """Reads the states of the i-th row of the data folder from the root; travels to spawned workers."""

    def __init__(self, rows: TrainerRows) -> None:
        self.rows = rows

    def get_cached(self, file_idx: int) -> dict[str, Tensor]:
        """`hidden_states` [T, L + 1, H], the last state behind the layers, and `token_ids` int64 [T]."""
        return speculators_tensors(self.rows[file_idx])

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Tensor] | None:
        """Refuse: every row of the data folder is stored."""
        raise NotImplementedError("layertap reads stored states; nothing is generated while training")


@HiddenStatesBackend.register("layertap")
class LayertapBackend(HiddenStatesBackend):
    """The backend that `--hidden-states-backend layertap` chooses."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add `--layertap-root`."""
        parser.add_argument(
            "--layertap-root", help="Where the root lies now, if not where --data-path says it does."
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Nothing to add: no server is launched."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> LayertapTransfer:
        """Open the root and version that the data folder names.

        Raises:
            CatalogError: the folder names none, the root can't serve speculators, or a drafter of other
                layers is to be trained.
        """
        pin = Path(data_path) / PIN
        if not pin.is_file():
            raise CatalogError(
                f"{data_path} has no {PIN}: make it with `layertap export --to speculators --tokens-only "
                f"ROOT {data_path}`"
            )
        pinned = json.loads(pin.read_text())
        rows = open_rows(args.layertap_root or pinned["root"], SPECULATORS_NEEDS, version=pinned["version"])
        if rows.states.version.content != pinned["content"]:
            raise CatalogError(
                f"version {pinned['version']} of {rows.states.store.uri} isn't the one that {data_path} was "
                "exported from: export it again"
            )
        _refuse_other_layers(rows, args.target_layer_ids)
        return LayertapTransfer(rows)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Refuse: no server is launched."""
        raise NotImplementedError("layertap reads stored states; no server is launched")


def _refuse_other_layers(rows: TrainerRows, asked: list[int] | None) -> None:
    """Speculators itself compares nothing but their number, and has a default of its own."""
    theirs = [k + 1 for k in rows.states.layer_ids]
    if asked != theirs:
        listed = "its default layers" if asked is None else f"layers {asked}"
        raise CatalogError(
            f"speculators would take the states of {rows.states.store.uri} for those of {listed}: give "
            f"--target-layer-ids {' '.join(map(str, theirs))} (one higher than layertap's)"
        )
