"""Automodel: its own DSpark cache reader over exported shards."""

from nemo_automodel.components.datasets.llm.dspark_cache import (
    CachedDSparkDataset,
    build_cached_dspark_dataloader,
    read_target_weight_modules,
)

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


def test_embedding_and_head_are_read(plain: Plain) -> None:
    embedding, head = read_target_weight_modules(str(plain.folder / "automodel"))
    assert embedding.weight.shape == head.weight.shape == (512, 64)
