"""Compiled layers compute what eager ones do."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from layertap.compiled import CONVOLUTION, DELTA_RULE, opaque_delta_rule, shifted_convolution
from layertap.errors import TargetError
from layertap.spec import ExtractionSpec
from layertap.target import Target
from tests.models import DEVICE, VOCAB_SIZE, tiny_hybrid, tiny_llama


@pytest.fixture(autouse=True)
def modeling_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (DELTA_RULE, CONVOLUTION):
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [tiny_hybrid, tiny_llama])
def test_compiled_layers_tap_the_same_states_for_any_shape(make: Any) -> None:
    spec = ExtractionSpec(
        target_identity="in memory", layer_ids=(0, 3), last_hidden_state="none", dtype="float32"
    )
    target = Target.from_backbone(make(), spec=spec)
    batches = [torch.randint(0, VOCAB_SIZE, shape, device=DEVICE) for shape in ((4, 37), (7, 80), (2, 200))]
    eager = [target.tap(ids_BT) for ids_BT in batches]
    target.compile()
    for ids_BT, expected in zip(batches, eager, strict=True):
        for mine, theirs in zip(target.tap(ids_BT), expected, strict=True):
            assert float((mine - theirs).norm() / theirs.norm()) < 1e-4


def test_the_shifted_convolution_is_the_depthwise_one() -> None:
    x, weight, bias = torch.randn(3, 8, 21), torch.randn(8, 4), torch.randn(8)
    for activation in (None, "silu"):
        mine = shifted_convolution(x, weight, bias, activation)
        theirs = modeling.causal_conv1d_fn(x, weight, bias, activation)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_what_can_not_be_computed_is_refused() -> None:
    x = torch.randn(1, 2, 2, 4)
    with pytest.raises(TargetError, match="neither a cache nor packed rows"):
        opaque_delta_rule(x, x, x, x[..., 0], x[..., 0], cu_seqlens=torch.tensor([0, 2]))
    with pytest.raises(TargetError, match="'relu' can't be compiled"):
        shifted_convolution(torch.randn(1, 2, 3), torch.randn(2, 4), activation="relu")
