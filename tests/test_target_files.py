"""A root holds its target's config, tokenizer, embedding, head and final norm, byte by byte."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from layertap.catalog import Catalog, Root
from layertap.errors import CatalogError, IntegrityError, TargetError
from layertap.norms import FinalNorm, identify_norm
from layertap.spec import ExtractionSpec
from layertap.store import Store
from layertap.target import Target, inspect_target
from layertap.target_files import RECORD, TargetFiles, store_target
from layertap.verify import verify_root
from tests.models import saved, tiny_hybrid, tiny_llama

STATES = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)) * 30


def load_target(folder: str, dtype: Any = "bfloat16") -> Target:
    info = inspect_target(folder)
    spec = ExtractionSpec(target_identity=info.identity, layer_ids=(0, 2), dtype=dtype)
    return Target.load(folder, spec=spec, device="cpu")


def stored(store: Store, folder: str, dtype: Any = "bfloat16") -> tuple[Target, TargetFiles]:
    target = load_target(folder, dtype)
    Catalog(store).create_root(Root(spec=target.spec, target=target.info.to_dict()))
    store_target(store, target)
    return target, TargetFiles(store)


@torch.inference_mode()
def normed(target: Target, states: Tensor) -> Tensor:
    found: Tensor = target.final_norm(states)
    return found


@pytest.mark.parametrize("model", [tiny_llama, tiny_hybrid])
def test_weights_are_those_of_the_checkpoint_and_the_norm_is_the_model_s_to_the_bit(
    store: Store, tmp_path: Path, model: Any
) -> None:
    made = model()
    target, files = stored(store, saved(made, tmp_path / "target"))
    assert torch.equal(files.weight("embed_tokens"), made.model.embed_tokens.weight.cpu())
    assert torch.equal(files.weight("lm_head"), made.lm_head.weight.cpu())
    states = STATES.bfloat16()
    assert torch.equal(files.final_norm()(states), normed(target, states))
    assert files.final_norm().kind == ("plain" if model is tiny_llama else "zero_centred")
    assert files.config["hidden_size"] == 64


def test_what_is_stored_loads_as_a_target_s_folder(folder_store: Store, tmp_path: Path) -> None:
    made = tiny_llama()
    source = Path(saved(made, tmp_path / "target"))
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (source / "trainer_state.json").write_text("{}")
    _, files = stored(folder_store, str(source))
    files.copy_to(tmp_path / "copy")
    copied = {path.name for path in (tmp_path / "copy").iterdir()}
    assert copied == files.record.files.keys()
    assert "tokenizer_config.json" in copied and "trainer_state.json" not in copied
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())["weight_map"]
    loaded = {name: load_file(tmp_path / "copy" / file)[name] for name, file in index.items()}
    assert torch.equal(loaded["lm_head.weight"], made.lm_head.weight.cpu())
    assert torch.equal(loaded["model.norm.weight"], made.model.norm.weight.cpu())
    assert AutoConfig.from_pretrained(tmp_path / "copy").vocab_size == 512


def test_a_target_of_the_hub_is_copied_from_its_local_cache(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, repo = "0" * 40, tmp_path / "models--tiny--llama"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    saved(tiny_llama(), repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    _, files = stored(folder_store, "tiny/llama")
    assert files.record.target_identity == f"hub:tiny/llama@{commit}"
    assert torch.equal(files.weight("lm_head"), tiny_llama().lm_head.weight.cpu())


def test_a_tied_head_is_said_to_be_the_embedding(folder_store: Store, tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    _, files = stored(folder_store, saved(model, tmp_path / "target"))
    assert files.record.tensors["lm_head"] == {"tied_to": "embed_tokens"}
    assert torch.equal(files.weight("lm_head"), model.model.embed_tokens.weight.cpu())


def test_a_wrapper_s_names_and_other_stacks_of_layers_mislead_nobody(
    folder_store: Store, tmp_path: Path
) -> None:
    """As in multimodal checkpoints: the decoder below a prefix, a multi-token head with a norm of its own."""
    made = tiny_hybrid()
    source = tmp_path / "target"
    saved(made, source)
    weights = load_file(source / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    wrapped["mtp.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4)
    wrapped["mtp.norm.weight"], wrapped["mtp.embed_tokens.weight"] = torch.ones(64), torch.zeros(512, 64)
    save_file(wrapped, source / "model.safetensors", {"format": "pt"})
    _, files = stored(folder_store, str(source))
    assert files.record.tensors["final_norm"]["name"] == "model.language_model.norm.weight"
    assert torch.equal(files.weight("embed_tokens"), made.model.embed_tokens.weight.cpu())


def test_a_checkpoint_without_a_head_says_so(folder_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "target"
    saved(tiny_llama(), source)
    weights = load_file(source / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    _, files = stored(folder_store, str(source))
    with pytest.raises(CatalogError, match="no lm_head of the target: the checkpoint has no such tensor"):
        files.weight("lm_head")
    assert files.weight("embed_tokens").shape == (512, 64)


def test_files_of_another_target_are_not_taken_for_this_one_s(folder_store: Store, tmp_path: Path) -> None:
    target = load_target(saved(tiny_llama(), tmp_path / "target"))
    other: PreTrainedModel = tiny_llama()
    nn.init.normal_(other.get_input_embeddings().weight)
    saved(other, tmp_path / "target")
    with pytest.raises(TargetError, match="isn't the embedding that target"):
        store_target(folder_store, target)
    assert not folder_store.exists(RECORD)


def test_it_is_written_once_and_complete_or_not_there(folder_store: Store, tmp_path: Path) -> None:
    target, _ = stored(folder_store, saved(tiny_llama(), tmp_path / "target"))
    shutil.rmtree(tmp_path / "target")
    store_target(folder_store, target)  # there is nothing left to copy from
    folder_store.delete([RECORD])
    with pytest.raises(
        CatalogError, match="no target/target.json. .* start one with a row that isn't stored"
    ):
        TargetFiles(folder_store)
    store_target(folder_store, load_target(saved(tiny_llama(), tmp_path / "target")))  # as its next lane does
    assert TargetFiles(folder_store).weight("embed_tokens").shape == (512, 64)


def test_a_damaged_file_is_named(folder_store: Store, tmp_path: Path) -> None:
    _, files = stored(folder_store, saved(tiny_llama(), tmp_path / "target"))
    data = bytearray(folder_store.get("target/lm_head.safetensors"))
    data[-1] ^= 1
    folder_store.put("target/lm_head.safetensors", data)
    with pytest.raises(IntegrityError, match="target/lm_head.safetensors hasn't the bytes"):
        files.copy_to(tmp_path / "copy")
    assert not (tmp_path / "copy" / "lm_head.safetensors").exists()
    with pytest.raises(IntegrityError, match="target/lm_head.safetensors hasn't the bytes"):
        files.weight("lm_head")
    files.store.put("target/lm_head.safetensors", bytes(data[:-1]) + bytes([data[-1] ^ 1]))
    files.copy_to(tmp_path / "copy")
    assert (tmp_path / "copy" / "lm_head.safetensors").exists()
    assert files.weight("lm_head").shape == (512, 64)


def test_a_damaged_file_in_a_bucket_is_named_and_its_way_out_helps(s3_store: Store, tmp_path: Path) -> None:
    folder = saved(tiny_llama(), tmp_path / "target")
    _, files = stored(s3_store, folder)
    verify_root(s3_store).check()
    for name in ("lm_head.safetensors", "config.json"):
        s3_store.put(f"target/{name}", s3_store.get(f"target/{name}").replace(b"e", b"E"))
    s3_store.delete(["target/final_norm.safetensors"])
    with pytest.raises(IntegrityError, match="target/lm_head.safetensors"):
        files.weight("lm_head")
    with pytest.raises(IntegrityError, match="target/config.json"):
        _ = files.config
    report = verify_root(s3_store)
    names = ["config.json", "final_norm.safetensors", "lm_head.safetensors"]
    assert sorted(finding.where for finding in report.findings) == [f"target/{name}" for name in names]
    (way_out,) = report.ways_out()
    assert f"remove {s3_store.uri}/{RECORD}" in way_out
    s3_store.delete([RECORD])
    store_target(s3_store, load_target(folder))
    verify_root(s3_store).check()
    s3_store.put(RECORD, b"{")
    assert [finding.where for finding in verify_root(s3_store).findings] == [RECORD]


@torch.inference_mode()
def test_cast_and_multiply_are_told_apart() -> None:
    norm = GptOssRMSNorm(64, eps=1e-5)
    nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    found = identify_norm(norm, norm.weight)
    assert found is not None
    assert (found.kind, found.order, found.eps) == ("plain", "multiply_then_cast", 1e-5)
    assert torch.equal(found(STATES.bfloat16()), norm(STATES.bfloat16()))
    swapped = FinalNorm(kind="plain", order="cast_then_multiply", eps=1e-5, weight=norm.weight.bfloat16())
    assert not torch.equal(swapped(STATES.bfloat16()), norm.bfloat16()(STATES.bfloat16()))


def test_an_unknown_norm_is_no_norm() -> None:
    norm = nn.LayerNorm(64)
    assert identify_norm(norm, norm.weight) is None


def test_a_norm_with_another_weight_than_the_checkpoint_s_is_no_norm() -> None:
    model: LlamaForCausalLM = tiny_llama()
    assert identify_norm(model.model.norm, model.model.norm.weight.detach() + 0.1) is None
