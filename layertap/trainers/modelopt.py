"""ModelOpt reads a root: a dataset in the place of its `OfflineSupervisedDataset`.

    dataset = LayertapDataset(root, answer_only_loss=True)
    trainer = Trainer(…, train_dataset=dataset, data_collator=EagleOfflineDataCollator(train_len=4096))

The last state is given after the final norm. ModelOpt's layer ids are layertap's.
"""

from pathlib import Path
from typing import Any

import torch
from modelopt.torch.speculative.eagle.utils import IGNORE_TOKEN_ID
from torch.utils.data import Dataset

from layertap.store import Store
from layertap.trainers.layouts import MODELOPT_NEEDS
from layertap.trainers.rows import open_rows


class LayertapDataset(Dataset[dict[str, Any]]):
    """The rows of a version as ModelOpt's offline samples.

    Args:
        root: the root: a path, `s3://bucket/prefix`, or a Store.
        answer_only_loss: whether the stored loss mask is used, or all tokens are trained on.
        version: which version; by default the newest complete one.

    Raises:
        CatalogError: the root holds no last hidden state, or none that can be normed.
    """

    def __init__(
        self, root: Store | str | Path, *, answer_only_loss: bool = False, version: int | None = None
    ) -> None:
        self.rows = open_rows(root, MODELOPT_NEEDS, version=version)
        self.answer_only_loss = answer_only_loss

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """The i-th sample, with the keys of `OfflineSupervisedDataset`."""
        row = self.rows[i]
        labels = torch.full_like(row.input_ids, IGNORE_TOKEN_ID)
        labels[:-1] = row.input_ids[1:]
        return {
            "input_ids": row.input_ids,
            "base_model_hidden_states": row.last,
            "aux_hidden_states": row.layers.flatten(1),
            "attention_mask": torch.ones_like(row.input_ids),
            "loss_mask": row.loss_mask if self.answer_only_loss else torch.ones_like(row.input_ids),
            "labels": labels,
            "base_hidden_prenorm": False,
        }
