"""speculators: its own dataset and loader over a root, over an exported folder, and against Hugging Face."""

import argparse
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hs_connectors import HiddenStatesBackend
from safetensors.torch import save_file
from speculators.data_generation.offline import check_hidden_states
from speculators.models.dflash import DFlashDraftModel
from speculators.models.utils import resolve_verifier_norm_class
from speculators.train.cli import build_draft_model, parse_vocab_mappings
from speculators.train.config import TrainConfig
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import create_train_val_loaders
from transformers import AutoConfig

from layertap.errors import CatalogError
from layertap.store import Store
from layertap.target_files import TargetFiles
from layertap.trainers.speculators import LayertapBackend, LayertapTransfer
from tests.contracts.plain import Plain, assert_same_training

LAYER_IDS = [1, 3, 4]
"""Layers 0, 2 and 3 as speculators counts them."""


def transfer_of(plain: Plain, **changes: Any) -> LayertapTransfer:
    args = argparse.Namespace(**{"layertap_root": None, "target_layer_ids": LAYER_IDS, **changes})
    return LayertapBackend.from_train_args(args, str(plain.folder / "speculators-tokens"))


def assert_dataset(plain: Plain, dataset: ArrowDataset) -> None:
    assert len(dataset) == len(plain)
    for i in range(len(plain)):
        sample = dataset[i]
        found = {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"],
            "layers": sample["hidden_states"],
            "pre_norm": sample["verifier_last_hidden_states"],
        }
        plain.assert_row(i, found)


def test_the_backend_reads_the_root(plain: Plain) -> None:
    data = str(plain.folder / "speculators-tokens")
    assert_dataset(plain, ArrowDataset(512, data, transfer=transfer_of(plain), on_missing="raise"))


def test_spawned_workers_read_the_root(plain: Plain) -> None:
    copied = pickle.loads(pickle.dumps(transfer_of(plain)))
    assert torch.equal(
        copied.get_cached(7)["hidden_states"], transfer_of(plain).get_cached(7)["hidden_states"]
    )


def test_exported_files_are_read(plain: Plain) -> None:
    assert_dataset(plain, ArrowDataset(512, str(plain.folder / "speculators"), on_missing="raise"))


def test_samples_pass_its_own_check(plain: Plain) -> None:
    transfer = transfer_of(plain)
    for i in range(len(plain)):
        payload = transfer.get_cached(i)
        check_hidden_states(payload, payload["token_ids"].tolist())


def test_a_validation_split_gets_its_own_rows(plain: Plain) -> None:
    data = str(plain.folder / "speculators-tokens")
    held_out = ArrowDataset(
        512, data, transfer=transfer_of(plain), on_missing="raise", train_ratio=0.75, split="val"
    )
    assert len(held_out) == 16
    plain.assert_row(48, {"input_ids": held_out[0]["input_ids"], "layers": held_out[0]["hidden_states"]})


def test_the_trainer_s_command_line_knows_the_backend(plain: Plain) -> None:
    assert HiddenStatesBackend.registry["layertap"] is LayertapBackend
    config = TrainConfig.resolve(
        [
            *("--hidden-states-backend", "layertap", "--layertap-root", plain.root),
            *("--data-path", str(plain.folder / "speculators-tokens")),
            *("--verifier-name-or-path", plain.target, "--speculator-type", "dflash"),
        ]
    )
    assert config.flatten()["layertap_root"] == plain.root


@pytest.mark.parametrize("layer_ids", [[0, 2, 3], None])
def test_other_layers_than_the_root_s_are_refused(plain: Plain, layer_ids: list[int] | None) -> None:
    with pytest.raises(CatalogError, match="--target-layer-ids 1 3 4"):
        transfer_of(plain, target_layer_ids=layer_ids)


def test_its_norm_of_the_state_is_the_target_s(plain: Plain) -> None:
    config = AutoConfig.from_pretrained(plain.target)
    speculator = argparse.Namespace(
        speculators_config=argparse.Namespace(verifier=argparse.Namespace(name_or_path=plain.target))
    )
    norm = resolve_verifier_norm_class(speculator)(config.hidden_size, eps=config.rms_norm_eps)
    norm.weight.data = TargetFiles(Store.open(plain.root)).weight("final_norm")
    for i in range(len(plain)):
        with torch.inference_mode():
            plain.assert_row(i, {"post_norm": norm(transfer_of(plain).get_cached(i)["hidden_states"][:, -1])})


def dumped(plain: Plain, folder: Path) -> str:
    """Plain forward passes in the layout of its prepare_data.py and of vLLM's connector, which isn't here."""
    rows = [plain.row(i) for i in range(len(plain))]
    columns = {name: [row[name].tolist() for row in rows] for name in ("input_ids", "loss_mask")}
    data = Dataset.from_dict({**columns, "seq_len": [len(ids) for ids in columns["input_ids"]]})
    data.set_format("torch")
    data.save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    for i, row in enumerate(rows):
        states = torch.cat([row["layers"], row["pre_norm"]], dim=1).unflatten(1, (len(LAYER_IDS) + 1, -1))
        tensors = {"hidden_states": states, "token_ids": row["input_ids"]}
        save_file(tensors, folder / "hidden_states" / f"hs_{i}.safetensors")
    return str(folder)


def losses(plain: Plain, data: str, transfer: LayertapTransfer | None) -> list[float]:
    """Twenty steps of its DFlash over its loader; its Trainer itself wants an accelerator."""
    torch.manual_seed(0)
    args = TrainConfig.resolve(
        [
            *("--data-path", data, "--verifier-name-or-path", plain.target, "--speculator-type", "dflash"),
            *("--target-layer-ids", "1", "3", "4", "--num-layers", "1", "--block-size", "4"),
            *("--draft-attn-impl", "eager", "--mask-token-id", "0", "--sliding-window", "64"),
            *("--loss-implementation", "eager", "--max-anchors", "16"),
        ]
    ).flatten()
    namespace = argparse.Namespace(**args)
    d2t, t2d, draft_vocab_size = parse_vocab_mappings(namespace)
    model = build_draft_model(namespace, DFlashDraftModel, t2d, d2t, draft_vocab_size).train()
    loader, _ = create_train_val_loaders(
        data_path=data,
        total_seq_len=128,
        hidden_states_dtype=torch.float32,
        transfer=transfer,
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path=plain.target,
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=64,
        num_target_layers=3,
        num_workers=0,
        prefetch_factor=0,
        preprocess=None,
    )
    call, _ = DFlashDraftModel.get_trainer_kwargs(**vars(namespace))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    found: list[float] = []
    while len(found) < 20:
        for batch in loader:
            batch.pop("error_records")
            _, loss, _ = model(**batch, **call)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found[:20]


def test_training_on_the_root_is_training_on_plain_states(plain: Plain, tmp_path: Path) -> None:
    from_root = losses(plain, str(plain.folder / "speculators-tokens"), transfer_of(plain))
    from_files = losses(plain, dumped(plain, tmp_path / "dumped"), None)
    assert_same_training(from_root, from_files)
