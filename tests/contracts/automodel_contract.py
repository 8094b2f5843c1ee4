"""Automodel: its own DSpark cache reader over exported shards."""

import pytest
import torch
from nemo_automodel.components.datasets.llm.dspark_cache import (
    CachedDSparkDataset,
    build_cached_dspark_dataloader,
    read_manifest,
    read_target_weight_modules,
)
from nemo_automodel.recipes.llm.train_dspark import _read_target_model_type, _validate_cached_dspark_manifest
from transformers import AutoConfig

from tests.contracts.plain import Plain


def test_exported_shards_are_read(plain: Plain) -> None:
    dataset = CachedDSparkDataset(str(plain.folder / "automodel"))
    assert len(dataset) == len(plain) and dataset.manifest["target_layer_ids"] == [0, 2, 3]
    for i in range(len(plain)):
        sample = dataset[i]
        num_tokens = plain.num_tokens(i)
        assert not any(tensor[num_tokens:].any() for tensor in sample.values())
        cut = {name: tensor[:num_tokens] for name, tensor in sample.items()}
        found = {
            "input_ids": cut["input_ids"],
            "loss_mask": cut["loss_mask"],
            "layers": cut["target_hidden_states"],
            "post_norm": cut["target_last_hidden_states"],
        }
        plain.assert_row(i, found)


def test_its_loader_takes_them(plain: Plain) -> None:
    batches = build_cached_dspark_dataloader(
        cache_dir=str(plain.folder / "automodel"), batch_size=16, shuffle=True
    )
    assert [batch["target_hidden_states"].shape for batch in batches] == [(16, 64, 192)] * 4


def test_its_recipe_takes_the_manifest_for_these_layers_alone(plain: Plain) -> None:
    cache, config = str(plain.folder / "automodel"), AutoConfig.from_pretrained(plain.target)

    def validate(layer_ids: list[int]) -> None:
        _validate_cached_dspark_manifest(
            cache,
            read_manifest(cache),
            config.get_text_config(),
            layer_ids,
            target_model="tiny",
            target_model_type=_read_target_model_type(plain.target, False),
            seq_length=64,
            compute_dtype=torch.float32,
        )

    validate([0, 2, 3])
    with pytest.raises(ValueError, match="target_layer_ids"):
        validate([1, 3, 4])


def test_embedding_and_head_are_read(plain: Plain) -> None:
    embedding, head = read_target_weight_modules(str(plain.folder / "automodel"))
    assert embedding.weight.shape == head.weight.shape == (512, 64)
