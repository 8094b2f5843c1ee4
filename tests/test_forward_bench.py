"""The benchmark of the forward pass: what it compares, and which layers it counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from layertap.bench import command, forward
from layertap.bench.random_targets import GROUP, SHAPES, build, layers_that_fit
from layertap.cli import main
from layertap.errors import InputError
from layertap.plan import PlanSettings
from tests.models import DEVICE

GIB = 1 << 30


@pytest.mark.usefixtures("modeling_as_it_was")
@pytest.mark.timeout(600)  # compiling takes long
def test_it_compares_a_row_at_a_time_batches_and_the_matrix_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PLAN_ROWS": 60, "NUM_BATCHES": 2, "NUM_TRIALS": 2}.items():
        monkeypatch.setattr(forward, name, value)
    monkeypatch.setattr(forward, "layers_that_fit", lambda *_: GROUP)
    settings = PlanSettings(max_batch_tokens=256)
    benchmarks = {"forward": lambda _: forward.measure("tiny", str(DEVICE), settings)}
    monkeypatch.setattr(command, "BENCHMARKS", benchmarks)
    out = tmp_path / "bench.json"
    shown = CliRunner().invoke(main, ["bench", "forward", "--json", str(out)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert all(
        word in shown.output for word in ("4 of 8 layers", "the same batches", "a row of 264 at a time")
    )
    batches, one_row, ceiling = json.loads(out.read_text())["measured"]
    assert batches["layertap"] == one_row["layertap"] > 0
    for row in (batches, one_row):
        assert row["ratio"] == pytest.approx(row["layertap"] / row["against"])
        assert len(row["details"]["layertap"]) == len(row["details"]["against"]) == 2
    assert_shares(batches, one_row, ceiling)


def assert_shares(batches: dict[str, Any], one_row: dict[str, Any], ceiling: dict[str, Any]) -> None:
    """The matrices of the layers that run count, and the better of two ceilings."""
    layers: Any = build("tiny", "meta", GROUP).layers
    num_parameters = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    assert ceiling["details"]["flops_per_token"] == 2 * num_parameters
    assert ceiling["against"] == pytest.approx(max(ceiling["details"]["ceilings"]) / 1e12)
    assert len(ceiling["details"]["ceilings"]) == 2
    share_of_one = 2 * num_parameters / ceiling["against"] / 1e12
    for tokens_per_s, share in (
        (batches["layertap"], ceiling["ratio"]),
        (batches["against"], batches["details"]["share_of_ceiling"]),
        (one_row["against"], one_row["details"]["share_of_ceiling"]),
    ):
        assert 0 < share < 1.5 and share == pytest.approx(tokens_per_s * share_of_one)


def test_a_target_has_as_many_layers_as_fit_in_whole_groups() -> None:
    found = {gib: layers_that_fit("27b", gib * GIB) for gib in (12, 22, 40, 78, 140)}
    assert list(found.values()) == sorted(found.values()) and found[140] == 64
    for gib, num_layers in found.items():
        assert num_layers % GROUP == 0 and weight_bytes("27b", num_layers) < 0.7 * gib * GIB
        assert num_layers == 64 or weight_bytes("27b", num_layers + GROUP) > 0.7 * gib * GIB
    with pytest.raises(InputError, match=r"4 layers of the 27b shape need 7\.4 GiB, and 4\.0 GiB are free"):
        layers_that_fit("27b", 4 * GIB)


def weight_bytes(shape: str, num_layers: int) -> int:
    model = build(shape, "meta", num_layers)
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_the_layers_they_say(shape: str) -> None:
    model: Any = build(shape, "meta")
    assert len(model.layers) == SHAPES[shape]["num_hidden_layers"]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
