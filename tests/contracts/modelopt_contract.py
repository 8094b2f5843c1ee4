"""ModelOpt: its own dataset and collator over exported files, and our dataset in its place."""

from pathlib import Path

import modelopt.torch.speculative as mtsp
import pytest
import torch
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from modelopt.torch.speculative.plugins.modeling_fakebase import FakeBaseModel
from transformers import Trainer, TrainingArguments

from layertap.trainers.modelopt import LayertapDataset
from tests.contracts.plain import Plain, assert_same_training


def exported(plain: Plain) -> list[str]:
    """As its examples list them."""
    return sorted(str(path) for path in Path(plain.folder / "modelopt").glob("**/*.pt"))


def assert_dataset(plain: Plain, dataset: OfflineSupervisedDataset | LayertapDataset) -> None:
    assert len(dataset) == len(plain)
    for i in range(len(plain)):
        sample = dataset[i]
        found = {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"],
            "layers": sample["aux_hidden_states"],
            "post_norm": sample["base_model_hidden_states"],
        }
        plain.assert_row(i, found)
        assert sample["base_hidden_prenorm"] is False


def test_the_dataset_reads_the_root(plain: Plain) -> None:
    assert_dataset(plain, LayertapDataset(plain.root, answer_only_loss=True))


def test_exported_files_are_read(plain: Plain) -> None:
    assert_dataset(plain, OfflineSupervisedDataset(exported(plain), answer_only_loss=True))


@pytest.mark.parametrize("answer_only_loss", [True, False])
def test_samples_and_batches_of_a_root_are_those_of_its_files(plain: Plain, answer_only_loss: bool) -> None:
    mine = LayertapDataset(plain.root, answer_only_loss=answer_only_loss)
    theirs = OfflineSupervisedDataset(exported(plain), answer_only_loss=answer_only_loss)
    collate = EagleOfflineDataCollator(train_len=48)
    for i in range(0, len(plain), 8):
        pair = [collate([dataset[k] for k in range(i, i + 8)]) for dataset in (mine, theirs)]
        flat = [{**batch.pop("base_model_outputs"), **batch} for batch in pair]
        assert flat[0].keys() == flat[1].keys()
        for name, value in flat[0].items():
            is_same = torch.equal(value, flat[1][name]) if torch.is_tensor(value) else value == flat[1][name]
            assert is_same, name


def test_its_fake_base_loads_from_the_root(plain: Plain) -> None:
    base = FakeBaseModel.from_source(plain.target)
    assert base.lm_head.weight.shape == base.embed_tokens.weight.shape == (512, 64)


def dumped(plain: Plain, folder: Path) -> list[str]:
    """Plain forward passes in the layout of its examples' dumper, which isn't in the package."""
    folder.mkdir()
    files = [str(folder / f"{i:02d}.pt") for i in range(len(plain))]
    for i, file in enumerate(files):
        row = plain.row(i)
        values = {"aux_hidden_states": row["layers"], "hidden_states": row["post_norm"]}
        torch.save({name: row[name] for name in ("input_ids", "loss_mask")} | values, file)
    return files


def losses(plain: Plain, dataset: OfflineSupervisedDataset | LayertapDataset, output: Path) -> list[float]:
    """Twenty steps of its DFlash in the Trainer of Transformers, as its examples do."""
    torch.manual_seed(0)
    model = FakeBaseModel.from_source(plain.target)
    config = {
        "dflash_offline": True,
        "dflash_block_size": 4,
        "dflash_mask_token_id": 0,
        "dflash_num_anchors": 16,
        "dflash_architecture_config": {
            "num_hidden_layers": 3,  # as many as target layers
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "target_layer_ids": [0, 2, 3],
        },
    }
    mtsp.convert(model, [("dflash", config)])
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        use_cpu=True,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(
        model, arguments, train_dataset=dataset, data_collator=EagleOfflineDataCollator(train_len=64)
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_training_on_the_root_is_training_on_plain_states(plain: Plain, tmp_path: Path) -> None:
    from_root = losses(plain, LayertapDataset(plain.root, answer_only_loss=True), tmp_path)
    files = OfflineSupervisedDataset(dumped(plain, tmp_path / "dumped"), answer_only_loss=True)
    from_files = losses(plain, files, tmp_path)
    assert_same_training(from_root, from_files)
