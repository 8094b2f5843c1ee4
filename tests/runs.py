"""Small datasets and runs on a tiny target, for tests of everything above the engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from layertap import HiddenStates
from layertap.lane import Lane
from layertap.lane_work import LaneReport, extract_in_threads
from layertap.plan import PlanSettings
from layertap.preview import RunSettings
from layertap.store import Store
from tests.models import VOCAB_SIZE

LAYERS = (0, 2, 3)

Rows = list[dict[str, Any]]


def some_rows(num_rows: int, *, seed: int = 0, longest: int = 60) -> Rows:
    """Distinct rows of random tokens, each with a mask and an id."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, num_rows)
    return [
        {
            # Two tokens that spell the row's number keep the rows distinct.
            "input_ids": [*divmod(i, VOCAB_SIZE), *random.integers(0, VOCAB_SIZE, n).tolist()],
            "loss_mask": random.integers(0, 2, n + 2).tolist(),
            "id": f"row-{seed}-{i}",
        }
        for i, n in enumerate(lengths.tolist())
    ]


def save_rows(rows: Rows, folder: Path) -> str:
    """Write rows as `datasets` does; returns the folder."""
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return str(folder)


def settings_for(dataset: str, target: str, **changes: Any) -> RunSettings:
    """A run over a small dataset: several batches a shard, several shards."""
    plan = PlanSettings(max_batch_tokens=256, shard_tokens=600)
    return RunSettings(
        **{
            "dataset": dataset,
            "target": target,
            "layer_ids": LAYERS,
            "dtype": "float32",
            "max_length": 64,
            "plan": plan,
            **changes,
        }
    )


def run_lane(
    store: Store, plan_id: str, target: str, name: str = "lane-0", *, compiled: bool = True
) -> LaneReport:
    """One lane, from loading the target to the last shard."""
    lane = Lane.open(store, plan_id, run="run", target=target, name=name, compiled=compiled)
    assert lane is not None
    with lane:
        return extract_in_threads(lane)


@torch.inference_mode()
def plain_states(model: Any, input_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, L, H] and [T, H] before the norm, of one row alone, as Hugging Face gives them."""
    raw: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda _m, _a, out: raw.append(out[0] if isinstance(out, tuple) else out)
    )
    out = model.model(input_ids=torch.tensor([input_ids]), use_cache=False, output_hidden_states=True)
    hook.remove()
    layers = [raw[0] if k == len(model.model.layers) - 1 else out.hidden_states[k + 1] for k in LAYERS]
    return torch.stack([state[0] for state in layers], dim=1), raw[0][0]


def assert_read_back(store: Store, rows: Rows, model: Any, *, version: int | None = None) -> None:
    """Every row is there once, under its own tokens and mask, with the states of a plain forward pass."""
    read = HiddenStates(store, version=version)
    assert [item["row"] for item in read] == list(range(len(rows)))
    for item, row in zip(read, rows, strict=True):
        assert item["input_ids"].tolist() == row["input_ids"]
        assert item["loss_mask"].tolist() == row["loss_mask"]
        layers, last = plain_states(model, row["input_ids"])
        torch.testing.assert_close(item["hidden_states"], layers, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(item["last_hidden_state"], last, rtol=1e-4, atol=1e-4)
