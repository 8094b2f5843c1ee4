"""What is tapped is what Hugging Face gives under the stated convention, and a wrong target is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertLMHeadModel, LlamaForCausalLM

import layertap.target
from layertap.errors import SelfCheckError, SpecError, TargetError
from layertap.kernels import is_context_fatal, is_out_of_memory
from layertap.spec import ExtractionSpec
from layertap.target import Target, compare_canary, drafter_layer_ids, inspect_target
from tests.models import (
    DEVICE,
    VOCAB_SIZE,
    constants,
    no_memory_of_the_driver,
    saved,
    tiny_hybrid,
    tiny_llama,
)

BUILDERS = {"llama": tiny_llama, "hybrid": tiny_hybrid}
IDENTITY = "folder:0"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    return {name: saved(build(), root / name) for name, build in BUILDERS.items()}


@pytest.fixture
def llama_folder(folders, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(folders["llama"], tmp_path / "llama"))


def spec_of(layer_ids, last="pre_norm", dtype="float32", identity=IDENTITY):
    return ExtractionSpec(
        target_identity=identity, layer_ids=layer_ids, last_hidden_state=last, dtype=dtype, max_length=64
    )


def load(folder, layer_ids, **fields):
    spec = spec_of(layer_ids, identity=inspect_target(folder).identity, **fields)
    return Target.load(folder, spec=spec, device=DEVICE)


def rows_of(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).to(DEVICE) for n in lengths]


def plain_states(folder, row):
    """By Hugging Face alone: the output of each decoder layer, and the last one before and after the norm."""
    backbone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval().model
    raw = []
    backbone.norm.register_forward_pre_hook(lambda _m, args: raw.append(args[0]))
    with torch.inference_mode():
        out = backbone(input_ids=row[None], output_hidden_states=True, use_cache=False)
    return {
        "layers": [*out.hidden_states[1:-1], raw[0]],
        "pre_norm": raw[0],
        "post_norm": out.hidden_states[-1],
    }


@pytest.mark.parametrize("last", ["pre_norm", "post_norm"])
@pytest.mark.parametrize("name", BUILDERS)
def test_first_middle_and_last_layer_and_the_last_state_equal_hugging_face(folders, name, last):
    folder = folders[name]
    num_layers = inspect_target(folder).num_hidden_layers
    layer_ids = (0, num_layers // 2, num_layers - 1)
    target = load(folder, layer_ids, last=last)
    for row in rows_of(11, 30):
        expected = plain_states(folder, row)
        states = target.tap(row[None])
        assert [len(states), target.state_names[-1]] == [4, "last_hidden_state"]
        for state, layer_id in zip(states, layer_ids, strict=False):
            assert torch.equal(state, expected["layers"][layer_id])
        assert torch.equal(states[-1], expected[last])


def test_layer_ids_count_decoder_layers_from_zero():
    """Decoder layer k of this model adds 1000 * (k + 1), so its output names it."""
    row = torch.tensor([[7, 0, 511]], device=DEVICE)
    target = Target.from_backbone(constants(5), spec=spec_of((0, 2, 4)))
    first, middle, last_layer, last = target.tap(row)
    for state, added in ((first, 1000), (middle, 6000), (last_layer, 15000), (last, 15000)):
        assert torch.equal(state, (row + added)[:, :, None].expand(-1, -1, 64).float())


def test_post_norm_is_the_final_norm_of_pre_norm():
    row = rows_of(9)[0][None]
    model = tiny_llama()
    pre = Target.from_backbone(tiny_llama(), spec=spec_of((0,), "pre_norm")).tap(row)[-1]
    post = Target.from_backbone(tiny_llama(), spec=spec_of((0,), "post_norm")).tap(row)[-1]
    assert torch.equal(post, model.model.norm(pre))
    assert not torch.allclose(post, pre)


@pytest.mark.parametrize("name", BUILDERS)
def test_stopping_early_changes_no_bit_and_drops_the_rest(name):
    ids = torch.stack(rows_of(20, 20))
    whole = Target.from_backbone(BUILDERS[name](), spec=spec_of((0, 2), "pre_norm"))
    model = BUILDERS[name]()
    early = Target.from_backbone(model, spec=spec_of((0, 2), "none"))
    assert len(model.model.layers) == model.config.num_hidden_layers == 3
    for a, b in zip(whole.tap(ids), early.tap(ids), strict=False):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pad", [0, 99])
@pytest.mark.parametrize("name", BUILDERS)
def test_padding_leaks_into_no_layer(name, pad):
    model = BUILDERS[name]()
    num_layers = model.config.num_hidden_layers
    target = Target.from_backbone(model, spec=spec_of(tuple(range(num_layers)), "post_norm"))
    rows = rows_of(40, 31, 12, 1)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    together = target.tap(padded)
    for k, row in enumerate(rows):
        for state, alone in zip(together, target.tap(row[None]), strict=True):
            error = (state[k, : len(row)] - alone[0]).norm(dim=-1) / alone[0].norm(dim=-1)
            # on a GPU, kernels round to TF32
            assert error.max() < (1e-4 if DEVICE.type == "cpu" else 1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", BUILDERS)
def test_the_self_check_passes_and_says_how_well(folders, name, dtype):
    target = load(folders[name], (0, 3), dtype=dtype)
    result = target.self_check()
    assert max(result["convention"]["errors"].values()) == 0
    for check in result.values():
        assert set(check["errors"]) == {"layer_0", "layer_3", "last_hidden_state"}
        assert max(check["errors"].values()) < check["tolerance"] / 4
    json.dumps(result)


def tap_with(hook, layer=1):
    """A target, checked against itself as it was before `hook` came onto a decoder layer."""
    model = tiny_llama()
    target = Target.from_backbone(model, spec=spec_of((0, 1, 2)))
    # prepended: it acts before the tap
    model.model.layers[layer].register_forward_hook(hook, prepend=True)
    return target


def test_the_self_check_finds_states_that_are_not_hugging_faces():
    target = tap_with(lambda _m, args, _out: args[0])
    with pytest.raises(SelfCheckError, match=r"differs from Hugging Face's own states .*layer_1: \d"):
        target.self_check()


def test_the_self_check_finds_rows_that_leak_into_each_other():
    def leak(_module, _args, out):
        return out + (out.mean(0, keepdim=True) if len(out) > 1 else 0)

    with pytest.raises(SelfCheckError, match=r"of a row depends on the padded rows beside it .*layer_1: "):
        tap_with(leak).self_check()


def test_the_self_check_finds_states_that_are_not_finite():
    with pytest.raises(SelfCheckError, match="layer_2: not finite"):
        tap_with(lambda _m, _a, out: out * torch.nan, layer=2).self_check()


def test_a_layer_that_gives_another_shape_is_refused():
    target = tap_with(lambda _m, _a, out: out[0])
    with pytest.raises(TargetError, match=r"decoder layer 1 gives \[5, 64\], not \[B, T, 64\]"):
        target.tap(rows_of(5)[0][None])


def test_a_layer_that_gives_a_tuple_is_tapped():
    target = tap_with(lambda _m, _a, out: (out,), layer=2)
    target._backbone.layers[3].register_forward_pre_hook(lambda _m, args: (args[0][0], *args[1:]))
    assert target.tap(rows_of(5)[0][None])[2].shape == (1, 5, 64)


def test_a_layer_that_computes_in_another_dtype_is_refused():
    target = tap_with(lambda _m, _a, out: out.double())
    with pytest.raises(TargetError, match=r"decoder layer 1 computes in torch.float64, not in float32"):
        target.tap(rows_of(5)[0][None])


def test_nothing_of_a_forward_pass_is_kept():
    target = Target.from_backbone(tiny_llama(), spec=spec_of((0,)))
    target.tap(rows_of(5)[0][None])
    assert target._taken == {}


def test_layers_the_target_lacks_are_refused_with_the_valid_range():
    with pytest.raises(SpecError, match=r"layer ids \[4\] are out of range: .* decoder layers 0 to 3"):
        Target.from_backbone(tiny_llama(4), spec=spec_of((0, 4)))


def test_a_model_without_a_list_of_decoder_layers_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    folder = saved(BertLMHeadModel(config), tmp_path)
    with pytest.raises(
        TargetError, match=r"BertLMHeadModel can't be tapped: its decoder BertModel has the parts emb"
    ):
        inspect_target(folder)


def test_weights_that_are_not_there_are_refused():
    model = tiny_llama().to("meta")
    with pytest.raises(TargetError, match=r"must lie whole on one device, but it has 0.00 GiB on meta"):
        Target.from_backbone(model, spec=spec_of((0,)))


def test_states_that_would_not_be_aligned_are_refused():
    model = tiny_llama()
    target = Target.from_backbone(model, spec=spec_of((0,)))
    odd = type(target.info)(**{**target.info.to_dict(), "hidden_size": 63})
    with pytest.raises(TargetError, match="hidden size 63 in bfloat16 is no multiple of 4 bytes"):
        Target(model, info=odd, spec=spec_of((0,), dtype="bfloat16"))


@pytest.mark.parametrize("name", BUILDERS)
def test_inspecting_tells_the_shape_without_the_weights(folders, name):
    info = inspect_target(folders[name])
    model = BUILDERS[name]()
    assert (info.hidden_size, info.vocab_size) == (64, VOCAB_SIZE)
    assert info.num_hidden_layers == len(model.model.layers)
    assert info.num_parameters == sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    assert info.executed_parameters(spec_of((0,), "none")) == info.num_parameters // info.num_hidden_layers
    assert info.executed_parameters(spec_of((0,))) == info.num_parameters
    assert info.quantization is None
    json.dumps(info.to_dict())


def test_of_a_mixture_of_experts_only_the_routed_experts_count(tmp_path):
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
    )
    info = inspect_target(saved(AutoModelForCausalLM.from_config(config), tmp_path))
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16
    assert info.num_parameters == 2 * (attention + 6 * 16 + 2 * (3 * 16 * 8))


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
LONGROPE_128 = LONGROPE | {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("rope", "max_positions"), [(DYNAMIC, 128), (LONGROPE_128, 512)], ids=["dynamic", "longrope"]
)
def test_length_dependent_rope_makes_a_row_depend_on_the_rows_beside_it(rope, max_positions):
    """Why `check_length` refuses such rows: above the limit the same row gets other states."""
    config = tiny_llama().config
    config.rope_parameters, config.max_position_embeddings = dict(rope), max_positions
    model = LlamaForCausalLM(config).to(DEVICE)
    target = Target.from_backbone(model, spec=spec_of((3,), "none"))
    row, short, long = rows_of(100, 128, 300)
    alone, beside_short, beside_long = (
        target.tap(torch.nn.utils.rnn.pad_sequence([row, *others], batch_first=True))[0][0, :100]
        for others in ([], [short], [long])
    )
    assert (beside_short - alone).norm() < 1e-2 * alone.norm()
    assert (beside_long - alone).norm() > 0.5 * alone.norm()
    target.info.check_length(128)
    with pytest.raises(TargetError, match="depend on the rows beside it"):
        target.info.check_length(300)


def inspect_with(folder, **fields):
    """Inspect the target with other fields in its config."""
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | fields))
    return inspect_target(str(folder))


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 128}, 128),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 128}, 128),
        ({"rope_parameters": LONGROPE_128, "max_position_embeddings": 512}, 128),
        ({"rope_parameters": LONGROPE, "max_position_embeddings": 512}, 512),
    ],
)
def test_rows_that_would_depend_on_their_neighbours_are_refused_by_the_config(llama_folder, fields, limit):
    info = inspect_with(llama_folder, **fields)
    info.check_length(limit)
    with pytest.raises(TargetError) as caught:
        info.check_length(limit + 1)
    assert str(caught.value) == (
        f"the longest row has {limit + 1} tokens, too many for target {str(llama_folder)!r}: above {limit} "
        "its rotary embedding (dynamic or longrope) takes its frequencies from the longest row of a batch, "
        f"so that a row's states would depend on the rows beside it. Lower max_length to {limit}: longer "
        "rows are cut then, or left out with too_long='refuse'"
    )


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn"])
def test_other_rope_is_limited_by_its_positions_alone(llama_folder, rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 1e4}
    if rope_type != "default":
        rope |= {"factor": 4.0}
    if rope_type == "yarn":
        rope |= {"original_max_position_embeddings": 128}
    info = inspect_with(llama_folder, rope_parameters=rope, max_position_embeddings=512)
    assert (info.max_positions, info.length_dependent_above) == (512, None)
    info.check_length(512)
    with pytest.raises(TargetError, match=r"has 513 tokens, too many .*: it has 512 positions \(max_pos"):
        info.check_length(513)


def test_of_rope_by_layer_type_the_smallest_limit_counts(tmp_path):
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": LONGROPE_128,
        },
    )
    info = inspect_target(saved(AutoModelForCausalLM.from_config(config), tmp_path))
    assert (info.max_positions, info.length_dependent_above) == (512, 128)


def test_learned_positions_are_a_limit_and_alibi_has_none(tmp_path):
    gpt2 = AutoConfig.for_model("gpt2", vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    info = inspect_target(saved(AutoModelForCausalLM.from_config(gpt2), tmp_path / "gpt2"))
    assert (info.max_positions, info.length_dependent_above) == (32, None)
    info.check_length(32)
    with pytest.raises(TargetError, match=r"has 33 tokens, .*gpt2': it has 32 .* Lower max_length to 32: "):
        info.check_length(33)

    bloom = AutoConfig.for_model("bloom", vocab_size=64, hidden_size=16, n_layer=1, n_head=2)
    info = inspect_target(saved(AutoModelForCausalLM.from_config(bloom), tmp_path / "bloom"))
    assert info.max_positions is None
    info.check_length(10**6)


def test_a_folders_identity_is_its_content(llama_folder, tmp_path):
    identity = inspect_target(str(llama_folder)).identity
    elsewhere = Path(shutil.copytree(llama_folder, tmp_path / "elsewhere"))
    os.utime(elsewhere / "config.json", (0, 0))
    (elsewhere / "README.md").write_text("not a weight")
    assert inspect_target(str(elsewhere)).identity == identity
    assert identity.startswith("folder:") and len(identity) == len("folder:") + 32

    weights = load_file(elsewhere / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, elsewhere / "model.safetensors", {"format": "pt"})
    assert inspect_target(str(elsewhere)).identity != identity


def test_another_target_than_the_specs_is_refused(folders):
    with pytest.raises(
        TargetError, match=r"is folder:[0-9a-f]{32}, but the extraction was made for folder:0: "
    ):
        Target.load(folders["llama"], spec=spec_of((0,)), device="cpu")


def damage(folder, what):
    weights = folder / "model.safetensors"
    if what == "no config":
        (folder / "config.json").unlink()
    elif what == "no weights":
        weights.unlink()
    elif what == "cut short":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size * 6 // 10])
    elif what == "a file of the index missing":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no config", r"llama has no config.json: give the folder that save_pretrained wrote"),
        ("no weights", r"llama has no \*.safetensors file: download the weights, or convert them"),
        ("cut short", r"weight file .*/model.safetensors is cut short or damaged: .* Copy it again"),
        ("a file of the index missing", r"llama lacks model-00002-of-00002.safetensors, named by"),
        ("no folder", r"target folder /.*/llama doesn't exist: give a folder with config.json or a hub id"),
    ],
)
def test_an_incomplete_folder_is_refused_naming_what_is_missing(llama_folder, what, message):
    damage(llama_folder, what)
    with pytest.raises(TargetError, match=message):
        inspect_target(str(llama_folder))


def test_a_checkpoint_without_some_weights_is_refused(llama_folder):
    weights = load_file(llama_folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, llama_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 weights \(model.layers.2.mlp.up_proj.weight\)"):
        load(str(llama_folder), (0,))


def test_a_checkpoint_without_its_head_is_taken(llama_folder):
    weights = load_file(llama_folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, llama_folder / "model.safetensors", {"format": "pt"})
    load(str(llama_folder), (0,)).self_check()


def test_weights_replaced_between_hash_and_load_are_refused(llama_folder, monkeypatch):
    spec = spec_of((0,), identity=inspect_target(str(llama_folder)).identity)

    def replace_and_load(*args):
        weights = {name: w * 1.5 for name, w in load_file(llama_folder / "model.safetensors").items()}
        save_file(weights, llama_folder / "new", {"format": "pt"})
        (llama_folder / "new").rename(llama_folder / "model.safetensors")
        return load_model(*args)

    load_model = layertap.target._load_model
    monkeypatch.setattr(layertap.target, "_load_model", replace_and_load)
    with pytest.raises(TargetError, match=r"model.safetensors changed while target .* was loaded, so its w"):
        Target.load(str(llama_folder), spec=spec, device="cpu")


def test_an_index_added_between_hash_and_load_is_refused(llama_folder, monkeypatch):
    spec = spec_of((0,), identity=inspect_target(str(llama_folder)).identity)

    def load_and_add(*args):
        loaded = load_model(*args)
        (llama_folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
        return loaded

    load_model = layertap.target._load_model
    monkeypatch.setattr(layertap.target, "_load_model", load_and_add)
    with pytest.raises(TargetError, match=r"model.safetensors.index.json changed while target .* was loaded"):
        Target.load(str(llama_folder), spec=spec, device="cpu")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": "x"},
        {"hidden_size": 30},
        {"num_attention_heads": 0},
        {"model_type": []},
        {"dtype": "q"},
    ],
)
def test_a_config_with_wrong_values_is_named(llama_folder, fields):
    config = json.loads((llama_folder / "config.json").read_text())
    (llama_folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(TargetError, match=r"the config of target /.*/llama/config.json can't be used: "):
        inspect_target(str(llama_folder))


@pytest.mark.parametrize("source", ["", " "])
def test_an_empty_target_is_not_the_current_folder(llama_folder, monkeypatch, source):
    monkeypatch.chdir(llama_folder)
    with pytest.raises(TargetError, match=f"the target is '{source}': give a folder with config.json"):
        inspect_target(source)


def test_a_model_that_needs_its_own_code_is_refused(llama_folder):
    config = json.loads((llama_folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "code.Config"}}
    (llama_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="its own code .* runs none of that: take a checkpoint whose arch"):
        inspect_target(str(llama_folder))


def test_the_checkpoints_quantisation_is_recorded(llama_folder):
    config = json.loads((llama_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (llama_folder / "config.json").write_text(json.dumps(config))
    quantization = inspect_target(str(llama_folder)).quantization
    assert quantization is not None and quantization["quant_method"] == "fp8"


@pytest.fixture
def offline_hub(folders, tmp_path, monkeypatch):
    """A local cache that knows `tiny/llama` at one commit, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, repo = "c0ffee" + "0" * 34, tmp_path / "models--tiny--llama"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(folders["llama"], repo / "snapshots" / commit)
    return commit


@pytest.mark.parametrize("by_commit", [False, True])
def test_a_hub_id_is_pinned_to_its_commit_offline(offline_hub, by_commit):
    info = inspect_target("tiny/llama", revision=offline_hub if by_commit else None)
    assert info.identity == f"hub:tiny/llama@{offline_hub}"
    assert (info.revision, info.num_hidden_layers) == (offline_hub, 4)


def test_a_hub_id_is_loaded_at_its_commit_offline(offline_hub):
    spec = spec_of((0,), identity=f"hub:tiny/llama@{offline_hub}")
    target = Target.load("tiny/llama", spec=spec, revision=offline_hub, device="cpu")
    assert target.info.revision == offline_hub


@pytest.mark.parametrize(
    ("name", "revision"), [("tiny/bert", None), ("tiny/llama", "v2"), ("no folder", None)]
)
def test_a_hub_id_nobody_knows_is_refused(offline_hub, name, revision):
    with pytest.raises(
        TargetError, match=f"target '{name}'.* is no folder here, and neither the hub nor the local"
    ):
        inspect_target(name, revision=revision)


def test_a_revision_of_a_folder_is_refused(folders):
    with pytest.raises(TargetError, match="revision 'main' is for the hub, and .* is a folder: leave it out"):
        inspect_target(folders["llama"], revision="main")


def test_a_canary_equals_itself_and_travels_as_safetensors(tmp_path):
    canary = Target.from_backbone(tiny_llama(), spec=spec_of((0, 2))).canary_states()
    save_file(canary, tmp_path / "canary.safetensors")
    again = Target.from_backbone(tiny_llama(), spec=spec_of((0, 2))).canary_states()
    compare_canary(again, load_file(tmp_path / "canary.safetensors"))
    assert sorted(canary) == ["input_ids", "last_hidden_state", "layer_0", "layer_2"]
    assert canary["layer_2"].shape == (64, 64)


def test_a_lane_with_other_weights_fails_the_canary():
    theirs = Target.from_backbone(tiny_llama(), spec=spec_of((0, 2))).canary_states()
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight *= 1.1
    mine = Target.from_backbone(model, spec=spec_of((0, 2))).canary_states()
    with pytest.raises(
        SelfCheckError, match=r"differs from the canary .* layer_2: \d.*, last_hidden_state"
    ) as info:
        compare_canary(mine, theirs)
    assert "layer_0" not in str(info.value)


def test_canaries_of_two_extractions_are_not_compared():
    target = Target.from_backbone(tiny_llama(), spec=spec_of((0, 2)))
    canary = target.canary_states()
    with pytest.raises(SelfCheckError, match="they are not of one extraction"):
        compare_canary(canary, {name: state for name, state in canary.items() if name != "layer_2"})
    with pytest.raises(
        SelfCheckError, match=r"layer_2 of the canary is \[64, 64\] torch.bfloat16, on this lane"
    ):
        compare_canary(canary, {**canary, "layer_2": canary["layer_2"].bfloat16()})


def test_the_environment_names_versions_device_and_kernels():
    environment = Target.from_backbone(tiny_hybrid(), spec=spec_of((0,))).environment()
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["device"]["type"] == DEVICE.type
    assert environment["attention"] == "sdpa"
    assert environment["kernels"]["causal_conv1d_fn"] == "transformers (reference)"
    json.dumps(environment)


def test_only_an_error_of_the_accelerator_itself_costs_the_process_its_gpu():
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    assert is_context_fatal(lost) and not is_out_of_memory(lost)
    for error in (no_memory_of_the_driver(), torch.OutOfMemoryError("CUDA out of memory")):
        assert is_out_of_memory(error) and not is_context_fatal(error)
    assert not is_context_fatal(RuntimeError("CUDA error"))


def test_a_kernel_that_wants_too_much_shared_memory_is_not_out_of_memory():
    class OutOfResources(Exception):
        """As Triton's, which isn't there without a GPU."""

    for kind in (OutOfResources, RuntimeError):
        said = "out of resource: shared memory, Required: 262144, Hardware limit: 232448"
        assert not is_out_of_memory(kind(said))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_what_a_cpu_computes(folders):
    identity = inspect_target(folders["llama"]).identity
    spec = spec_of((0, 3), identity=identity, dtype="bfloat16")
    on_gpu, on_cpu = (Target.load(folders["llama"], spec=spec, device=kind) for kind in ("cuda", "cpu"))
    assert on_gpu.device == torch.device("cuda", 0)
    compare_canary(on_gpu.canary_states(), on_cpu.canary_states())


FAKE_FLA = """
def chunk_gated_delta_rule(*args, **kwargs):
    raise RuntimeError("0 active drivers")
"""


@pytest.fixture
def fake_fla(tmp_path):
    """An environment for a process in which `fla` is installed, and there is no GPU to run it."""
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    for name in ("__init__.py", "ops/__init__.py", "ops/gated_delta_rule.py"):
        (tmp_path / "fla" / name).write_text(FAKE_FLA)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("first", "printed"),
    [
        ("", "runs with transformers (reference)"),
        (
            "import transformers.models.qwen3_5.modeling_qwen3_5",
            "torch_chunk_gated_delta_rule runs on a GPU only",
        ),
    ],
)
def test_gpu_kernels_are_kept_out_on_a_cpu_or_named(folders, fake_fla, first, printed):
    code = f"""
{first}
from layertap.errors import TargetError
from layertap.spec import ExtractionSpec
from layertap.target import Target, inspect_target
info = inspect_target({folders["hybrid"]!r})
spec = ExtractionSpec(target_identity=info.identity, layer_ids=(0,), dtype="float32")
try:
    target = Target.load(info.source, spec=spec, device="cpu")
    target.self_check()
    print("runs with", target.environment()["kernels"]["torch_chunk_gated_delta_rule"])
except TargetError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], env=fake_fla, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(printed)


@pytest.mark.parametrize(
    "config", [{"target_layer_ids": [1, 16, 31]}, {"dflash_config": {"target_layer_ids": [1, 16, 31]}}]
)
def test_layer_ids_come_from_the_drafters_config(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert drafter_layer_ids(tmp_path) == drafter_layer_ids(tmp_path / "config.json") == (1, 16, 31)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no target_layer_ids: give the layer ids themselves; they are never guessed"),
        ('{"speculators_model_type": "dflash", "target_layer_ids": [2]}', "whose layer ids are one higher"),
        ("not json", "can't be read"),
        ("[1, 2]", "can't be read: it holds no JSON object"),
    ],
)
def test_a_drafter_config_without_clear_layer_ids_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TargetError, match=message):
        drafter_layer_ids(tmp_path)


@pytest.mark.parametrize("ids", ['[1, "x"]', "[]", "5", "[1.7]", "[true]", '"12"'])
@pytest.mark.parametrize("form", ['{"target_layer_ids": %s}', '{"dflash_config": {"target_layer_ids": %s}}'])
def test_a_drafter_config_with_other_things_than_layer_ids_is_refused(tmp_path, form, ids):
    (tmp_path / "config.json").write_text(form % ids)
    text = f"target_layer_ids in {tmp_path / 'config.json'} is {json.loads(ids)!r}, not a list of layer ids"
    with pytest.raises(SpecError, match=re.escape(text)):
        drafter_layer_ids(tmp_path)


@pytest.mark.parametrize("value", [None, [1, 2]])
def test_a_dflash_config_that_is_none_is_refused(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({"dflash_config": value}))
    with pytest.raises(SpecError, match=re.escape(f"config.json is {value!r}, not an object with target_l")):
        drafter_layer_ids(tmp_path)
