"""Compiled layers compute what eager ones do, and say with which kernels."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextModel
from transformers.models.qwen3_next import modeling_qwen3_next as other_modeling

from layertap import attention, delta_net
from layertap.attention import fuse_attention
from layertap.compiled import (
    CONVOLUTION,
    DELTA_RULE,
    MAX_VARIANTS,
    compile_layers,
    opaque_delta_rule,
    shifted_convolution,
)
from layertap.delta_net import fuse_delta_nets, is_fused
from layertap.errors import TargetError
from layertap.kernels import ROTARY, refuse_slow_kernels
from layertap.spec import ExtractionSpec
from layertap.target import Target
from tests.models import DEVICE, VOCAB_SIZE, tiny_hybrid, tiny_llama

pytestmark = [pytest.mark.usefixtures("modeling_as_it_was"), pytest.mark.timeout(600)]  # compiling takes long

NEAR = 1e-3 if DEVICE.type == "cuda" else 1e-4
"""Relative; Triton multiplies float32 as TF32, by which two tilings of one kernel of fla differ."""

SPEC = ExtractionSpec(
    target_identity="in memory", layer_ids=(0, 3), last_hidden_state="none", dtype="float32"
)


@pytest.mark.parametrize("make", [tiny_hybrid, tiny_llama])
def test_compiled_layers_tap_the_same_states_for_any_shape(make: Any) -> None:
    target = Target.from_backbone(make(), spec=SPEC)
    batches = [
        torch.randint(0, VOCAB_SIZE, shape, device=DEVICE) for shape in ((4, 37), (7, 80), (1, 200), (3, 1))
    ]
    eager, before = [target.tap(ids_BT) for ids_BT in batches], target.environment()
    target.compile(max_batch_tokens=256)
    for ids_BT, expected in zip(batches, eager, strict=True):
        for mine, theirs in zip(target.tap(ids_BT), expected, strict=True):
            assert float((mine - theirs).norm() / theirs.norm()) < NEAR
    target.self_check()
    with ThreadPoolExecutor(1) as lane_s_thread:
        lane_s_thread.submit(target.tap, batches[0]).result()
        limit = lane_s_thread.submit(lambda: torch._dynamo.config.recompile_limit).result()
    assert limit == MAX_VARIANTS
    after = target.environment()
    assert (before["compiled"], after["compiled"]) == (False, True)
    fused = {CONVOLUTION: "layertap.delta_net", ROTARY: "layertap.attention"}
    on_gpu = {DELTA_RULE: "fla.ops.gated_delta_rule"} if DEVICE.type == "cuda" else {}
    replaced = fused | on_gpu if before["kernels"] else {}
    assert after["kernels"] == before["kernels"] | replaced


def test_a_gpu_kernel_behind_the_operator_is_named_and_refused_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def implementation(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("0 active drivers")

    implementation.__module__ = "fla.ops.gated_delta_rule"
    first, second = Target.from_backbone(tiny_hybrid(), spec=SPEC), tiny_hybrid().cpu()
    monkeypatch.setattr(modeling, DELTA_RULE, lambda *args, **kwargs: implementation(*args, **kwargs))
    compile_layers(first._backbone.layers)
    assert first.environment()["kernels"][DELTA_RULE] == "fla.ops.gated_delta_rule"
    first_told = {"cpu": "fla.ops.gated_delta_rule", "cuda": "fla.modules.causal_conv1d"}[DEVICE.type]
    with pytest.raises(TargetError, match=rf"runs on a GPU only \({first_told}\)"):
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


def test_the_fused_delta_net_is_the_plain_one() -> None:
    model = tiny_hybrid().model
    batches = [torch.randint(0, VOCAB_SIZE, shape, device=DEVICE) for shape in ((3, 70), (2, 1))]
    with torch.inference_mode():
        plain = [model(input_ids=ids_BT, use_cache=False).last_hidden_state for ids_BT in batches]
        fuse_delta_nets(model.layers)
        fused = [model(input_ids=ids_BT, use_cache=False).last_hidden_state for ids_BT in batches]
    assert sum(is_fused(block) for block in model.modules()) == 6
    for mine, theirs in zip(fused, plain, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < NEAR


def test_the_fused_attention_is_the_plain_one() -> None:
    model = tiny_hybrid().model
    for layer in model.layers[3::4]:
        torch.nn.init.normal_(layer.self_attn.q_norm.weight, std=0.3)
    batches = [torch.randint(0, VOCAB_SIZE, shape, device=DEVICE) for shape in ((3, 70), (2, 1))]
    with torch.inference_mode():
        plain = [model(input_ids=ids_BT, use_cache=False).last_hidden_state for ids_BT in batches]
        fuse_attention(model.layers)
        fused = [model(input_ids=ids_BT, use_cache=False).last_hidden_state for ids_BT in batches]
    assert sum(attention.is_fused(block) for block in model.modules()) == 2
    for mine, theirs in zip(fused, plain, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < NEAR / 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-4)])
def test_kernels_of_our_own_are_their_references_at_the_size_of_a_real_target(
    dtype: torch.dtype, near: float
) -> None:
    key_heads, value_heads, size, num_taps = 16, 48, 128, 4
    channels = (2 * key_heads + value_heads) * size
    mixed = torch.randn(3, 517, channels + 96).to(dtype)[..., :channels]  # of one product
    taps = torch.randn(channels, num_taps).to(dtype)
    heads = torch.randn(3, 517, 24, 2 * 256).to(dtype)[..., :256]  # the gate lies beside each head
    scale, angles = torch.randn(256).to(dtype), torch.randn(1, 517, 64)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    on = [
        [
            *delta_net.convolve(mixed.to(device), taps.to(device), key_heads, size),
            attention.normalise_and_rotate(*(x.to(device) for x in (heads, scale, cos, sin)), 1e-6),
        ]
        for device in ("cuda", "cpu")
    ]
    for mine, theirs in zip(*on, strict=True):
        difference = mine.cpu().double() - theirs.double()
        assert float(difference.norm() / theirs.double().norm()) < near


def test_eager_attention_stays_as_it_is() -> None:
    model = tiny_hybrid().model
    model.config._attn_implementation = "eager"
    fuse_attention(model.layers)
    assert not any(attention.is_fused(block) for block in model.modules())


def test_fused_blocks_refuse_a_cache_and_a_mask() -> None:
    model = tiny_hybrid().model
    fuse_delta_nets(model.layers)
    fuse_attention(model.layers)
    ids_BT = torch.ones(2, 5, dtype=torch.long, device=DEVICE)
    with pytest.raises(TargetError, match="cache"):
        model(input_ids=ids_BT, use_cache=True)
    with pytest.raises(TargetError, match="mask"):
        model(input_ids=ids_BT, attention_mask=torch.tensor([[0] + [1] * 4] * 2).to(DEVICE), use_cache=False)


def test_without_fla_nothing_of_a_gpu_s_delta_nets_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hybrid().model
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(model.layers, "parameters", lambda: iter([on_gpu]))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    fuse_delta_nets(model.layers)
    assert not any(is_fused(block) for block in model.modules())


def test_fused_projections_take_no_second_copy_of_the_weights() -> None:
    model = tiny_hybrid().model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    fuse_delta_nets(model.layers)
    block = next(block for block in model.modules() if is_fused(block))
    inside = block.projection.untyped_storage().data_ptr()
    assert block.in_proj_z.weight.untyped_storage().data_ptr() == inside
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in before.items())


def test_a_block_with_biases_or_quantised_weights_stays_as_it_is() -> None:
    model = tiny_hybrid().model
    first, second = [block for block in model.modules() if hasattr(block, "in_proj_qkv")][:2]
    first.in_proj_b.bias = torch.nn.Parameter(torch.zeros(6))
    second.in_proj_a = type("Quantised", (torch.nn.Linear,), {})(64, 6, bias=False)
    fuse_delta_nets(model.layers)
    assert (is_fused(first), is_fused(second)) == (False, False)


def test_slow_reference_code_is_refused_on_a_gpu_with_the_way_out() -> None:
    layers = tiny_hybrid().model.layers
    refuse_slow_kernels(layers, torch.device("cpu"))
    slow = {"cpu": DELTA_RULE, "cuda": CONVOLUTION}[DEVICE.type]  # a GPU host has fla for the other
    with pytest.raises(TargetError, match=f"{slow} would run.*install flash-linear-att"):
        refuse_slow_kernels(layers, torch.device("cuda"))
    refuse_slow_kernels(tiny_llama().model.layers, torch.device("cuda"))


def test_a_delta_rule_under_another_name_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling, DELTA_RULE, None)
    with pytest.raises(TargetError, match="isn't known what .* transformers has no torch_chunk_gated"):
        refuse_slow_kernels(tiny_hybrid().model.layers, torch.device("cuda"))


def test_layers_that_can_not_be_compiled_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.from_backbone(tiny_llama(), spec=SPEC)

    def fail(_layers: torch.nn.ModuleList) -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError("no such luck")

    monkeypatch.setattr("layertap.target.compile_layers", fail)
    with pytest.raises(TargetError, match="of llama can't be compiled: run with `compiled` off. no such"):
        target.compile(max_batch_tokens=256)


@pytest.mark.parametrize("make", [tiny_hybrid, tiny_llama])
def test_compiled_layers_are_as_near_to_float32_as_eager_ones(make: Any) -> None:
    spec = replace(SPEC, dtype="bfloat16")
    batches = [torch.randint(0, VOCAB_SIZE, shape, device=DEVICE) for shape in ((32, 64), (12, 100))]
    exact = Target.from_backbone(make().to(torch.bfloat16).float(), spec=SPEC)  # of the same weights
    expected = [target_states for ids_BT in batches for target_states in exact.tap(ids_BT)]
    target = Target.from_backbone(make().to(torch.bfloat16), spec=spec)
    eager = _errors(target, batches, expected)
    target.compile(max_batch_tokens=2048)
    compiled = _errors(target, batches, expected)
    assert all(mine <= 1.2 * theirs for mine, theirs in zip(compiled, eager, strict=True)), (compiled, eager)


def _errors(target: Target, batches: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Of each state of each batch, the median and the 0.9 quantile of its tokens' relative errors."""
    states = [state for ids_BT in batches for state in target.tap(ids_BT)]
    errors = [
        ((mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)).flatten()
        for mine, theirs in zip(states, expected, strict=True)
    ]
    return [float(error.quantile(share)) for error in errors for share in (0.5, 0.9)]
