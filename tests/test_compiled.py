"""Compiled layers compute what eager ones do, and say with which kernels."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextModel
from transformers.models.qwen3_next import modeling_qwen3_next as other_modeling

from layertap.compiled import (
    CONVOLUTION,
    DELTA_RULE,
    compile_layers,
    opaque_delta_rule,
    shifted_convolution,
)
from layertap.errors import TargetError
from layertap.spec import ExtractionSpec
from layertap.target import Target
from tests.models import DEVICE, VOCAB_SIZE, tiny_hybrid, tiny_llama


@pytest.fixture(autouse=True)
def modeling_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (modeling, other_modeling):
        for name in (DELTA_RULE, CONVOLUTION):
            monkeypatch.setattr(module, name, getattr(module, name))
    yield
    torch._dynamo.reset()


SPEC = ExtractionSpec(
    target_identity="in memory", layer_ids=(0, 3), last_hidden_state="none", dtype="float32"
)


@pytest.mark.parametrize("make", [tiny_hybrid, tiny_llama])
def test_compiled_layers_tap_the_same_states_for_any_shape(make: Any) -> None:
    target = Target.from_backbone(make(), spec=SPEC)
    batches = [
        torch.randint(0, VOCAB_SIZE, shape, device=DEVICE) for shape in ((4, 37), (7, 80), (1, 200), (3, 1))
    ]
    eager = [target.tap(ids_BT) for ids_BT in batches]
    target.compile(max_batch_tokens=256)
    for ids_BT, expected in zip(batches, eager, strict=True):
        for mine, theirs in zip(target.tap(ids_BT), expected, strict=True):
            assert float((mine - theirs).norm() / theirs.norm()) < 1e-4


def test_the_environment_says_that_layers_are_compiled_and_names_the_kernels_still() -> None:
    target = Target.from_backbone(tiny_hybrid(), spec=SPEC)
    eager = target.environment()
    target.compile(max_batch_tokens=256)
    compiled = target.environment()
    assert (eager["compiled"], compiled["compiled"]) == (False, True)
    assert compiled["kernels"] == eager["kernels"] | {CONVOLUTION: "layertap.compiled"}
    assert DELTA_RULE in eager["kernels"]


def test_a_gpu_kernel_behind_the_operator_is_named_and_refused_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def implementation(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("0 active drivers")

    implementation.__module__ = "fla.ops.gated_delta_rule"
    first, second = Target.from_backbone(tiny_hybrid(), spec=SPEC), tiny_hybrid().cpu()
    monkeypatch.setattr(modeling, DELTA_RULE, lambda *args, **kwargs: implementation(*args, **kwargs))
    first.compile(max_batch_tokens=256)
    assert first.environment()["kernels"][DELTA_RULE] == "fla.ops.gated_delta_rule"
    with pytest.raises(TargetError, match=r"runs on a GPU only \(fla.ops.gated_delta_rule\)"):
        Target.from_backbone(second, spec=SPEC)


def test_each_of_two_families_in_one_process_keeps_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    families = {modeling: (tiny_hybrid().model, 2), other_modeling: (tiny_qwen3_next(), 3)}
    for module, (model, factor) in families.items():
        monkeypatch.setattr(module, DELTA_RULE, lambda q, k, v, *, f=factor, **_: (v * f, None))
        compile_layers(model.layers)
    x = torch.randn(1, 2, 2, 4)
    for module, (_, factor) in families.items():
        out, _ = getattr(module, DELTA_RULE)(x, x, x, g=x[..., 0], beta=x[..., 0])
        assert torch.equal(out, x * factor)


def tiny_qwen3_next() -> Qwen3NextModel:
    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_experts=2,
        num_experts_per_tok=1,
        num_hidden_layers=1,
    )
    return Qwen3NextModel(config)


def test_the_shifted_convolution_is_the_depthwise_one() -> None:
    x, weight, bias = torch.randn(3, 8, 21), torch.randn(8, 4), torch.randn(8)
    for activation in (None, "silu"):
        mine = shifted_convolution(x, weight, bias, activation)
        theirs = modeling.causal_conv1d_fn(x, weight, bias, activation)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_what_can_not_be_computed_is_refused() -> None:
    x = torch.randn(1, 2, 2, 4)
    with pytest.raises(TargetError, match="neither a cache nor packed rows"):
        opaque_delta_rule(modeling.__name__, x, x, x, x[..., 0], x[..., 0], cu_seqlens=torch.tensor([0, 2]))
    with pytest.raises(TargetError, match="'relu' can't be compiled"):
        shifted_convolution(torch.randn(1, 2, 3), torch.randn(2, 4), activation="relu")
