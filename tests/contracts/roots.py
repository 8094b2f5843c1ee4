"""What the contracts are held against: roots of tiny targets, and the same rows through plain Hugging Face.

Run by layertap's own environment, before the trainers' own:  python -m tests.contracts.roots FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from layertap.coordinator import Run
from layertap.store import Store
from layertap.trainers.choose import layout_for
from layertap.trainers.export import Export
from layertap.trainers.rows import open_rows
from tests.models import saved, tiny_hybrid, tiny_llama
from tests.runs import plain_states, run_lane, save_rows, settings_for, some_rows

MODELS = {"llama": tiny_llama, "hybrid": tiny_hybrid}
NUM_ROWS = 64

EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "speculators": ("speculators", {}),
    "speculators-tokens": ("speculators", {"tokens_only": True}),
    "specforge-eagle3": ("specforge", {"algorithm": "eagle3"}),
    "specforge-dflash": ("specforge", {"algorithm": "dflash"}),
    "specforge-dspark": ("specforge", {"algorithm": "dspark"}),
    "modelopt": ("modelopt", {}),
    "automodel": ("automodel", {"seq_length": 64, "target_name": "tiny"}),
}
"""Folder -> trainer and options."""


def make_root(folder: Path, model: Any) -> None:
    """Extract some rows, export them to every trainer, and compute them again row by row."""
    rows = some_rows(NUM_ROWS)
    for row in rows:
        row["loss_mask"] = [int(k > 0) for k in range(len(row["input_ids"]))]
        row["loss_mask"][len(row["input_ids"]) // 2] = 0
    target = saved(model, folder / "target")
    store = Store.folder(folder / "root")
    run = Run.prepare(store, settings_for(save_rows(rows, folder / "rows"), target))
    assert run.plan is not None
    run_lane(store, run.plan.plan_id, target)
    run.publish()
    for name, (trainer, options) in EXPORTS.items():
        layout = layout_for(trainer, **options)
        Export.plan(open_rows(store, layout.needs), layout, folder / name, settings=options).run()
    save_file(_plain(model, rows), folder / "plain.safetensors")


@torch.inference_mode()
def _plain(model: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for i, row in enumerate(rows):
        layers, last = plain_states(model, row["input_ids"])
        tensors |= {
            f"{i}/input_ids": torch.tensor(row["input_ids"]),
            f"{i}/loss_mask": torch.tensor(row["loss_mask"]),
            f"{i}/layers": layers.flatten(1).clone(),
            f"{i}/pre_norm": last.clone(),
            f"{i}/post_norm": model.model.norm(last),
        }
    return tensors


if __name__ == "__main__":
    for name, model in MODELS.items():
        make_root(Path(sys.argv[1]) / name, model())
