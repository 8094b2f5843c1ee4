"""A multimodal wrapper as the target: its text model is what is tapped, with its own weights and sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
)

from layertap import HiddenStates
from layertap.coordinator import Run
from layertap.errors import TargetError
from layertap.spec import ExtractionSpec
from layertap.store import Store
from layertap.target import Target
from layertap.target_files import TargetFiles, store_target
from layertap.target_info import inspect_target
from tests.models import DEVICE, VOCAB_SIZE, saved, tiny_hybrid
from tests.runs import LAYERS, run_lane, save_rows, settings_for, some_rows

HIDDEN_SIZE = 64
OTHER_SIZE = 32
"""Hidden size of the part that sees, which must not be taken for the text model's."""


def tiny_qwen() -> Qwen3_5ForConditionalGeneration:
    """A wrapper as Qwen3.5's checkpoints are: a hybrid of 8 layers beside 2 that see."""
    torch.manual_seed(0)
    vision = {
        "depth": 2,
        "hidden_size": OTHER_SIZE,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 16,
    }
    text = tiny_hybrid().config.to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=VOCAB_SIZE - 1)
    return Qwen3_5ForConditionalGeneration(config).eval().to(DEVICE)


def tiny_gemma() -> Gemma3ForConditionalGeneration:
    """A wrapper that transformers loads whole, with what sees in it."""
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
    }
    vision = {
        "hidden_size": OTHER_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=VOCAB_SIZE - 1
    )
    return Gemma3ForConditionalGeneration(config).eval().to(DEVICE)


@torch.inference_mode()
def own_states(model: PreTrainedModel, input_ids: list[int]) -> list[torch.Tensor]:
    """What the wrapper itself gives for a row of text: [T, H] after each decoder layer but the last."""
    ids_BT = torch.tensor([input_ids], device=DEVICE)
    out: Any = model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    return [state[0] for state in out.hidden_states[1:-1]]


@pytest.mark.parametrize("make", [tiny_qwen, tiny_gemma])
def test_the_text_model_of_a_wrapper_is_tapped_with_its_own_weights_and_sizes(
    make: Any, tmp_path: Path
) -> None:
    wrapper = make()
    source = saved(wrapper, tmp_path / "target")
    num_layers = wrapper.config.get_text_config().num_hidden_layers
    info = inspect_target(source)
    assert (info.hidden_size, info.num_hidden_layers, info.vocab_size) == (
        HIDDEN_SIZE,
        num_layers,
        VOCAB_SIZE,
    )
    layer_ids = (0, num_layers - 2)
    spec = ExtractionSpec(target_identity=info.identity, layer_ids=layer_ids, dtype="float32", max_length=64)
    target = Target.load(source, spec=spec, device=DEVICE)
    target.self_check()
    row = list(range(3, 40, 2))
    plain = own_states(wrapper, row)
    taps = target.tap(torch.tensor([row], dtype=torch.int32, device=DEVICE))
    for layer_id, tap in zip(layer_ids, taps, strict=False):
        torch.testing.assert_close(tap[0], plain[layer_id], rtol=1e-4, atol=1e-4)


def test_a_run_on_a_wrapper_stores_the_text_model_s_states_and_side_data(
    folder_store: Store, tmp_path: Path
) -> None:
    wrapper, rows = tiny_qwen(), some_rows(12)
    source = saved(wrapper, tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(rows, tmp_path / "rows"), source))
    assert run.plan is not None
    run_lane(folder_store, run.plan.plan_id, source)
    run.publish().check(0.0)
    read = HiddenStates(folder_store)
    for i, row in enumerate(rows):
        plain = torch.stack([own_states(wrapper, row["input_ids"])[k] for k in LAYERS], dim=1)
        torch.testing.assert_close(read[i]["hidden_states"], plain.cpu(), rtol=1e-3, atol=1e-3)
    files = TargetFiles(folder_store)
    assert torch.equal(files.weight("embed_tokens"), wrapper.get_input_embeddings().weight.cpu())
    assert torch.equal(files.weight("lm_head"), wrapper.lm_head.weight.cpu())


def with_configs(source: Path, *, wrapper: bool, text: bool | None) -> None:
    """Change what a saved wrapper and its text part say of tied embeddings; None: nothing."""
    config = json.loads((source / "config.json").read_text())
    config["tie_word_embeddings"] = wrapper
    config["text_config"].pop("tie_word_embeddings", None)
    if text is not None:
        config["text_config"]["tie_word_embeddings"] = text
    (source / "config.json").write_text(json.dumps(config))


def with_head(source: Path, head: Tensor | None) -> None:
    """Give a saved checkpoint a head of its own, or none, and one for multi-token prediction."""
    weights = load_file(source / "model.safetensors")
    for name in [
        name for name in weights if name.endswith("lm_head.weight")
    ]:  # saved under one name or another
        del weights[name]
    weights["mtp.lm_head.weight"] = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    if head is not None:
        weights["lm_head.weight"] = head
    save_file(weights, source / "model.safetensors", {"format": "pt"})


def side_data(store: Store, source: Path) -> TargetFiles:
    info = inspect_target(str(source))
    spec = ExtractionSpec(target_identity=info.identity, layer_ids=(0, 2))
    store_target(store, Target.load(str(source), spec=spec, device=DEVICE))
    return TargetFiles(store)


@pytest.mark.parametrize("make", [tiny_qwen, tiny_gemma])
@pytest.mark.parametrize(("wrapper", "text"), [(False, True), (True, None), (True, False)])
def test_a_head_of_the_checkpoint_is_the_head_whatever_its_configs_say(
    folder_store: Store, tmp_path: Path, make: Any, wrapper: bool, text: bool | None
) -> None:
    source, head = Path(saved(make(), tmp_path / "target")), torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    with_head(source, head)
    with_configs(source, wrapper=wrapper, text=text)
    assert torch.equal(side_data(folder_store, source).weight("lm_head"), head)


@pytest.mark.parametrize("make", [tiny_qwen, tiny_gemma])
@pytest.mark.parametrize(("wrapper", "text"), [(False, True), (True, None), (True, False)])
def test_without_one_it_is_the_embedding_if_either_config_says_so(
    folder_store: Store, tmp_path: Path, make: Any, wrapper: bool, text: bool | None
) -> None:
    model = make()
    source = Path(saved(model, tmp_path / "target"))
    with_head(source, None)
    with_configs(source, wrapper=wrapper, text=text)
    files = side_data(folder_store, source)
    assert files.record.tensors["lm_head"] == {"tied_to": "embed_tokens"}
    assert torch.equal(files.weight("lm_head"), model.get_input_embeddings().weight.cpu())


def test_a_wrapper_that_transformers_knows_no_text_model_of_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    Qwen3VLConfig().save_pretrained(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(TargetError, match="no causal language model that transformers knows.*'qwen3_vl'"):
        inspect_target(str(folder))
