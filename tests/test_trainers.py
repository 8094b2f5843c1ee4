"""Rows in the terms of trainers, and their files: read back as trainers do, equal to plain forward passes.

The trainers' own readers are in tests/contracts, which `make contracts` runs.
"""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from layertap import HiddenStates
from layertap.cli import main
from layertap.coordinator import Run
from layertap.errors import CatalogError, InputError
from layertap.records import to_json
from layertap.store import Store
from layertap.trainers import export as export_module
from layertap.trainers.choose import layout_for
from layertap.trainers.export import Export
from layertap.trainers.rows import open_rows
from tests.models import saved, tiny_hybrid, tiny_llama
from tests.runs import LAYERS, plain_states, run_lane, save_rows, settings_for, some_rows
from tests.stored import with_huge_masks

ROWS = some_rows(24)
ROWS[5]["loss_mask"] = [k % 2 for k in range(len(ROWS[5]["input_ids"]))]  # never two in succession

TOLERANCE = 1e-3
"""Noise of float32 in other shapes; the next layer, or the other norm, differs by about 1."""

WITH_PAIR = [row for row in ROWS if "11" in "".join(map(str, row["loss_mask"]))]


def make_root(folder: Path, model: Any, **changes: Any) -> str:
    target = saved(model, folder / "target")
    settings = settings_for(save_rows(ROWS, folder / "rows"), target, **changes)
    store = Store.folder(folder / "root")
    run = Run.prepare(store, settings)
    assert run.plan is not None
    run_lane(store, run.plan.plan_id, target)
    run.publish()
    return str(folder / "root")


@pytest.fixture(scope="module", params=[tiny_llama, tiny_hybrid])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture(scope="module")
def root(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_root(tmp_path_factory.mktemp("run"), model)


@pytest.fixture(scope="module")
def plain_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_root(tmp_path_factory.mktemp("run"), tiny_llama())


def export_to(root: str, out: Path, trainer: str, **options: Any) -> Path:
    plan_export(root, out, trainer, **options).run()
    return out


def plan_export(root: str, out: Path, trainer: str, **options: Any) -> Export:
    layout = layout_for(trainer, **options)
    settings = {"trainer": trainer, **options}
    return Export.plan(open_rows(root, layout.needs), layout, out, settings=settings)


@torch.inference_mode()
def post_norm(model: Any, last: Tensor) -> Tensor:
    found: Tensor = model.model.norm(last)
    return found


def assert_row(found: Mapping[str, Any], row: Mapping[str, Any], model: Any, *, norm: str | None) -> None:
    """Ids, mask, layers and last state of a plain forward pass over the row alone."""
    assert found["input_ids"].tolist() == row["input_ids"]
    assert found["loss_mask"].tolist() == row["loss_mask"]
    layers, last = plain_states(model, row["input_ids"])
    torch.testing.assert_close(found["layers"], layers.flatten(1), rtol=TOLERANCE, atol=TOLERANCE)
    if norm:
        expected = post_norm(model, last) if norm == "post_norm" else last
        torch.testing.assert_close(found["last"], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_post_norm_is_the_model_s_own_norm_to_the_bit(root: str, model: Any) -> None:
    rows = open_rows(root, layout_for("modelopt").needs)
    for i, stored in enumerate(HiddenStates(root)):
        assert torch.equal(rows[i].last, post_norm(model, stored["last_hidden_state"]))
        assert torch.equal(rows[i].layers, stored["hidden_states"])


def test_speculators_files(root: str, model: Any, tmp_path: Path) -> None:
    out = export_to(root, tmp_path / "out", "speculators")
    data = datasets.load_from_disk(str(out))
    assert len(data) == len(ROWS) and data.with_format(None)["seq_len"] == [len(r["input_ids"]) for r in ROWS]
    for i, row in enumerate(ROWS):
        payload = load_file(out / "hidden_states" / f"hs_{i}.safetensors")
        assert payload["token_ids"].dtype == torch.int64
        assert torch.equal(payload["token_ids"], data[i]["input_ids"])
        states = payload["hidden_states"]
        found = {**data[i], "layers": states[:, :-1].flatten(1), "last": states[:, -1]}
        assert_row(found, row, model, norm="pre_norm")


def test_tokens_alone_name_the_root_that_holds_the_states(plain_root: str, tmp_path: Path) -> None:
    out = export_to(plain_root, tmp_path / "out", "speculators", tokens_only=True)
    assert not (out / "hidden_states").exists()
    assert datasets.load_from_disk(str(out))[3]["input_ids"].tolist() == ROWS[3]["input_ids"]
    pin = json.loads((out / "layertap.json").read_text())
    assert (pin["root"], pin["version"]) == (plain_root, 1)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "domino", "dspark"])
def test_specforge_files(root: str, model: Any, tmp_path: Path, algorithm: str) -> None:
    out = export_to(root, tmp_path / "out", "specforge", algorithm=algorithm)
    files = sorted(str(path) for path in out.rglob("*.ckpt"))
    rows = ROWS if algorithm == "eagle3" else WITH_PAIR
    assert len(files) == len(rows)
    for file, row in zip(files, rows, strict=True):
        raw = torch.load(file, weights_only=True)
        if algorithm == "eagle3":
            assert raw["aux_hidden_state"].shape == (1, len(row["input_ids"]), 3 * 64)
            found = {**raw, "layers": raw["aux_hidden_state"][0], "last": raw["hidden_state"][0]}
            assert_row(found, row, model, norm="post_norm")
        elif algorithm == "dspark":
            found = {**raw, "layers": raw["hidden_states"][0], "last": raw["target_last_hidden_states"][0]}
            assert_row(found, row, model, norm="post_norm")
        else:
            assert raw.keys() == {"input_ids", "loss_mask", "hidden_states"}
            assert_row({**raw, "layers": raw["hidden_states"][0]}, row, model, norm=None)


def test_rows_are_judged_as_specforge_will_have_cut_them(plain_root: str, tmp_path: Path) -> None:
    cut = 6
    taken = [row for row in WITH_PAIR if "11" in "".join(map(str, row["loss_mask"][:cut]))]
    assert 0 < len(taken) < len(WITH_PAIR)
    out = export_to(plain_root, tmp_path / "out", "specforge", algorithm="dflash", seq_length=cut)
    files = [torch.load(path, weights_only=True) for path in sorted(out.rglob("*.ckpt"))]
    assert [file["input_ids"].tolist() for file in files] == [row["input_ids"] for row in taken]


@pytest.mark.parametrize(
    ("trainer", "options"),
    [("speculators", {"tokens_only": True}), ("specforge", {"algorithm": "dflash"})],
)
def test_masks_of_more_than_2_31_tokens(
    plain_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, options: dict[str, Any]
) -> None:
    expected = export_to(plain_root, tmp_path / "small", trainer, **options)
    with_huge_masks(monkeypatch, reason="refused")
    found = export_to(plain_root, tmp_path / "large", trainer, **options)
    for path in filter(Path.is_file, expected.rglob("*")):
        assert (found / path.relative_to(expected)).read_bytes() == path.read_bytes(), path


def test_modelopt_files(root: str, model: Any, tmp_path: Path) -> None:
    out = export_to(root, tmp_path / "out", "modelopt")
    files = sorted(str(path) for path in out.rglob("*.pt"))
    assert len(files) == len(ROWS)
    for file, row in zip(files, ROWS, strict=True):
        raw = torch.load(file, weights_only=True)
        assert raw["hidden_states_prenorm"] is False
        found = {**raw, "layers": raw["aux_hidden_states"], "last": raw["hidden_states"]}
        assert_row(found, row, model, norm="post_norm")


def test_automodel_files(root: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layertap.trainers.automodel.SHARD_ROWS", 10)
    out = export_to(root, tmp_path / "out", "automodel", seq_length=40, target_name="tiny")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["complete"] and manifest["target_layer_ids"] == list(LAYERS)
    assert (manifest["num_samples"], manifest["shard_size"], manifest["seq_length"]) == (24, 10, 40)
    shards = [load_file(out / f"shard-{k:06d}.safetensors") for k in range(3)]
    for i, row in enumerate(ROWS):
        sample = {name: tensor[i % 10] for name, tensor in shards[i // 10].items()}
        num_tokens = min(40, len(row["input_ids"]))
        assert not any(tensor[num_tokens:].any() for tensor in sample.values())
        cut = {name: tensor[:num_tokens] for name, tensor in sample.items()}
        found = {**cut, "layers": cut["target_hidden_states"], "last": cut["target_last_hidden_states"]}
        shorter = {name: row[name][:num_tokens] for name in ("input_ids", "loss_mask")}
        assert_row(found, shorter, model, norm="post_norm")
    weights = load_file(out / "target_weights.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], model.model.embed_tokens.weight.cpu())
    assert torch.equal(weights["lm_head.weight"], model.lm_head.weight.cpu())


def test_deepspec_files(tmp_path: Path) -> None:
    root = make_root(tmp_path, tiny_llama(), dtype="bfloat16")
    layout = layout_for("deepspec", target_name="tiny")
    layout.shard_bytes = 100_000  # type: ignore[attr-defined]
    out = tmp_path / "out"
    Export.plan(open_rows(root, layout.needs), layout, out, settings={}).run()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["num_shards"] > 1 and manifest["num_samples"] == len(ROWS)
    index = (out / "samples.idx").read_bytes()
    norm = tiny_llama().bfloat16()
    for i, stored in enumerate(HiddenStates(root)):
        sample, shard, num_tokens, *offsets = struct.unpack_from("<QIIQQQQQ", index, 56 * i)
        assert (sample, num_tokens) == (i, len(ROWS[i]["input_ids"]))
        data = (out / manifest["shards"][shard]["file_name"]).read_bytes()

        def part(k: int, dtype: Any, width: int = 1) -> np.ndarray:
            return np.frombuffer(data, dtype, num_tokens * width, offsets[k])  # noqa: B023

        assert part(0, "<i4").tolist() == ROWS[i]["input_ids"]
        assert part(1, "u1").all() and part(2, "u1").tolist() == ROWS[i]["loss_mask"]
        layers = torch.from_numpy(part(3, "<i2", 3 * 64).copy()).view(torch.bfloat16)
        last = torch.from_numpy(part(4, "<i2", 64).copy()).view(torch.bfloat16)
        assert torch.equal(layers.view(num_tokens, 3, 64), stored["hidden_states"])
        assert torch.equal(last.view(num_tokens, 64), post_norm(norm, stored["last_hidden_state"]))


def test_deepspec_refuses_other_dtypes(plain_root: str, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="DeepSpec's files hold bfloat16, but .* holds float32"):
        export_to(plain_root, tmp_path / "out", "deepspec", target_name="tiny")


def test_the_target_lies_beside_the_rows(plain_root: str, tmp_path: Path) -> None:
    out = export_to(plain_root, tmp_path / "out", "modelopt")
    index = json.loads((out / "target" / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(out / "target" / index["lm_head.weight"], "pt") as file:
        assert torch.equal(file.get_tensor("lm_head.weight"), tiny_llama().lm_head.weight.cpu())


class Killed(BaseException):
    """Ends an export at any point, as a kill does: nothing cleans up."""


@pytest.mark.parametrize("trainer", ["speculators", "modelopt", "automodel"])
def test_a_killed_export_goes_on_with_what_is_missing(
    plain_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    monkeypatch.setattr("layertap.trainers.automodel.SHARD_ROWS", 5)
    monkeypatch.setattr(export_module, "THREADS", 1)
    options = {"seq_length": 64, "target_name": "tiny"} if trainer == "automodel" else {}
    whole = export_to(plain_root, tmp_path / "whole", trainer, **options)
    out, written = tmp_path / "out", []
    planned = plan_export(plain_root, out, trainer, **options)
    layout = type(planned.layout)
    write = layout.write

    def write_half(self: Any, rows: Any, file: Any, path: Path) -> None:
        write(self, rows, file, path)
        if len(written) == len(planned.files) // 2:
            path.write_bytes(path.read_bytes()[:100])
            raise Killed
        written.append(file.name)

    monkeypatch.setattr(layout, "write", write_half)
    with pytest.raises(Killed):
        planned.run()
    monkeypatch.setattr(layout, "write", write)
    again = plan_export(plain_root, out, trainer, **options)
    assert {file.name for file in again.missing} == {file.name for file in again.files} - set(written)
    again.run()
    assert plan_export(plain_root, out, trainer, **options).missing == []
    for path in filter(Path.is_file, whole.rglob("*")):
        assert (out / path.relative_to(whole)).read_bytes() == path.read_bytes(), path
    assert not list(out.rglob("*.part"))


def test_an_export_killed_at_its_first_write_goes_on(
    plain_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        raise Killed

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        export_to(plain_root, tmp_path / "out", "modelopt")
    monkeypatch.setattr(Path, "replace", replace)
    export_to(plain_root, tmp_path / "out", "modelopt")
    assert not list((tmp_path / "out").rglob("*.part"))


def test_a_file_has_its_name_when_a_loss_of_power_can_t_empty_it(
    plain_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync, replace = set[int](), os.fsync, Path.replace

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(self: Path, target: Path) -> Path:
        assert self.stat().st_ino in synced, self
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "replace", checked)
    export_to(plain_root, tmp_path / "out", "modelopt")


def test_an_export_says_what_it_writes(plain_root: str, tmp_path: Path) -> None:
    command = ["export", "--to", "specforge", "--algorithm", "dflash", plain_root, str(tmp_path / "out")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert f"{len(WITH_PAIR)} rows of version 1 in {len(WITH_PAIR)} files, about " in result.output
    assert f"{len(ROWS) - len(WITH_PAIR)} rows are left out" in result.output
    said = int(result.output.split("about ")[1].split(" bytes")[0].replace(",", ""))
    taken = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert taken <= said <= 1.5 * taken
    again = CliRunner().invoke(main, command)
    assert f"{len(WITH_PAIR)} files are there already" in again.output


def test_a_folder_of_another_export_is_left_alone(plain_root: str, tmp_path: Path) -> None:
    export_to(plain_root, tmp_path / "out", "modelopt")
    with pytest.raises(InputError, match=r"another export \(trainer 'modelopt' there, 'speculators' asked\)"):
        export_to(plain_root, tmp_path / "out", "speculators")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="isn't empty and holds no export"):
        export_to(plain_root, tmp_path / "other", "modelopt")


def test_a_small_disk_is_found_out_before(
    plain_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(InputError, match="whose disk has 1,000 free"):
        export_to(plain_root, tmp_path / "out", "modelopt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("last", "trainer", "options", "reason"),
    [
        ("none", "speculators", {}, "speculators needs the last hidden state, and .* holds none"),
        ("none", "specforge", {"algorithm": "dspark"}, "DSpark needs the last hidden state"),
        ("none", "modelopt", {}, "--last-hidden-state pre_norm, which is the default"),
        ("post_norm", "speculators", {}, "which can't be undone"),
    ],
)
def test_what_a_root_lacks_is_said(
    tmp_path: Path, last: Any, trainer: str, options: dict[str, Any], reason: str
) -> None:
    root = make_root(tmp_path, tiny_llama(), last_hidden_state=last)
    with pytest.raises(CatalogError, match=reason):
        export_to(root, tmp_path / "out", trainer, **options)
    if last == "none":
        export_to(root, tmp_path / "dflash", "specforge", algorithm="dflash")


def test_automodel_wants_the_target_s_embedding(plain_root: str, tmp_path: Path) -> None:
    root = shutil.copytree(plain_root, tmp_path / "root")
    record = json.loads((root / "target" / "target.json").read_text())
    del record["tensors"]["embed_tokens"]
    record["missing"]["embed_tokens"] = "model.embed_tokens.weight is quantised (I8)"
    (root / "target" / "target.json").write_bytes(to_json(record))
    with pytest.raises(CatalogError, match="has no embed_tokens of the target: .* is quantised"):
        plan_export(str(root), tmp_path / "out", "automodel", seq_length=9, target_name="tiny")


def test_eagle3_takes_three_layers(tmp_path: Path) -> None:
    root = make_root(tmp_path, tiny_llama(), layer_ids=(0, 2))
    with pytest.raises(CatalogError, match=r"takes 3 layers, but .* holds 2 \(0, 2\)"):
        export_to(root, tmp_path / "out", "specforge", algorithm="eagle3")


def test_options_belong_to_their_trainers() -> None:
    with pytest.raises(InputError, match="specforge needs --algorithm"):
        layout_for("specforge")
    with pytest.raises(InputError, match="--seq-length means nothing to modelopt"):
        layout_for("modelopt", seq_length=4)
