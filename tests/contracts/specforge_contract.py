"""SpecForge: its own loader, normalisers and collators over a root and over exported files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.data.loss_mask import has_consecutive_supervised_tokens
from specforge.launch import build_disagg_offline_runtime, build_offline_runtime
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from transformers import Qwen3Config

from layertap.store import Store
from layertap.target_files import TargetFiles
from layertap.trainers.specforge import LayertapFeatureStore
from tests.contracts.plain import Plain, assert_same_training

ALGORITHMS = ("eagle3", "dflash", "dspark")
MAX_LEN = 64


def provider_of(algorithm: str) -> Any:
    return builtin_algorithm_registry().resolve(algorithm).providers.offline_for("text")


def loader(
    store: Any, refs: Any, algorithm: str, batch_size: int, max_len: int = MAX_LEN
) -> FeatureDataLoader:
    provider = provider_of(algorithm)
    return FeatureDataLoader(
        store,
        refs=refs,
        batch_size=batch_size,
        collate_fn=provider.build_collator(),
        per_sample_transform=provider.build_normalizer(max_len, ttt_length=7, use_usp_preprocess=False),
        drop_last=False,
        strategy=algorithm,
        num_workers=2,
    )


def assert_batches(plain: Plain, batches: FeatureDataLoader, algorithm: str) -> None:
    """Batches of one row each; of the DFlash family those that its normaliser takes."""
    rows = list(range(len(plain)))
    if algorithm != "eagle3":
        rows = [i for i in rows if has_consecutive_supervised_tokens(plain.loss_mask(i))]
        assert 0 < len(rows) < len(plain)
    for i, batch in zip(rows, batches, strict=True):
        tensors = {name: tensor[0] for name, tensor in batch.tensors.items()}
        found = {"input_ids": tensors["input_ids"]}
        if algorithm == "eagle3":  # its normaliser supervises no last token
            found |= {"layers": tensors["hidden_state"], "post_norm": tensors["target"]}
        else:
            found |= {"loss_mask": tensors["loss_mask"], "layers": tensors["hidden_states"]}
        if algorithm == "dspark":
            found["post_norm"] = tensors["target_last_hidden_states"]
        plain.assert_row(i, found)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_feature_store_reads_the_root(plain: Plain, algorithm: Any) -> None:
    store = LayertapFeatureStore(plain.root, algorithm=algorithm)
    assert_batches(plain, loader(store, store.refs(), algorithm, 1), algorithm)


def test_rows_of_which_its_cut_would_leave_nothing_are_left_out(plain: Plain) -> None:
    store = LayertapFeatureStore(plain.root, algorithm="dflash")
    with pytest.warns(UserWarning, match="rows are left out: no two in succession of their first 3 tokens"):
        refs = store.refs(max_len=3)
    found = [batch.tensors["loss_mask"][0].tolist() for batch in loader(store, refs, "dflash", 1, max_len=3)]
    cut = [plain.loss_mask(i)[:3] for i in range(len(plain))]
    assert found == [mask.tolist() for mask in cut if has_consecutive_supervised_tokens(mask)]
    assert len(found) < len(store.refs(max_len=MAX_LEN))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exported_files_are_read(plain: Plain, algorithm: str) -> None:
    folder = str(plain.folder / f"specforge-{algorithm}")
    reader = provider_of(algorithm).build_reader(folder, run_id="contract", ttt_length=7, max_len=MAX_LEN)
    reader.validate_files = True
    assert_batches(plain, loader(LocalFeatureStore(), reader.read(), algorithm, 1), algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batches_of_a_root_are_those_of_its_files(plain: Plain, algorithm: Any) -> None:
    store = LayertapFeatureStore(plain.root, algorithm=algorithm)
    folder = str(plain.folder / f"specforge-{algorithm}")
    reader = provider_of(algorithm).build_reader(folder, run_id="contract", ttt_length=7, max_len=MAX_LEN)
    pairs = zip(
        loader(store, store.refs(), algorithm, 5),
        loader(LocalFeatureStore(), reader.read(), algorithm, 5),
        strict=True,
    )
    for mine, theirs in pairs:
        assert mine.tensors.keys() == theirs.tensors.keys() and mine.metadata == theirs.metadata
        assert all(torch.equal(mine.tensors[name], theirs.tensors[name]) for name in mine.tensors)


def test_its_head_loads_from_the_root(plain: Plain) -> None:
    head = TargetHead.from_pretrained(plain.target)
    assert head.fc.weight.shape == (512, 64) and head.fc.weight.float().std() > 0


@pytest.fixture
def single_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FSDP_SHARDING", "NO_SHARD")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def dflash(plain: Plain) -> OnlineDFlashModel:
    """A drafter of one layer, with the embedding and the head of the root's target."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        dflash_config={"target_layer_ids": [0, 2, 3], "mask_token_id": 0},
        block_size=4,
        num_target_layers=4,
    )
    config._attn_implementation = "sdpa"
    files = TargetFiles(Store.open(plain.root))
    head = torch.nn.Linear(64, 512, bias=False)
    head.weight.data = files.weight("lm_head")
    embedding = torch.nn.Embedding.from_pretrained(files.weight("embed_tokens"))
    return OnlineDFlashModel(
        DFlashDraftModel(config),
        head.requires_grad_(False),
        embedding,
        mask_token_id=0,
        block_size=4,
        attention_backend="sdpa",
        num_anchors=16,
    )


def dumped(plain: Plain, folder: Path) -> str:
    """Plain forward passes in the layout of its prepare_hidden_states.py, which isn't in the package."""
    folder.mkdir()
    for i in range(len(plain)):
        row = plain.row(i)
        tensors = {name: row[name] for name in ("input_ids", "loss_mask")}
        if has_consecutive_supervised_tokens(row["loss_mask"]):  # it stops at any other row
            torch.save({**tensors, "hidden_states": row["layers"][None]}, folder / f"data_{i:02d}.ckpt")
    return str(folder)


def losses(plain: Plain, build: Any, output: Path, **source: Any) -> list[float]:
    """Twenty steps of its own trainer."""
    found: list[float] = []
    trainer = build(
        algorithm=builtin_algorithm_registry().resolve("dflash"),
        draft_model=dflash(plain),
        target_head=None,
        optimizer_factory=lambda model: BF16Optimizer(model, lr=3e-3, total_steps=20, warmup_ratio=0.0),
        run_id="contract",
        output_dir=str(output),
        max_len=MAX_LEN,
        batch_size=8,
        num_epochs=3,
        max_steps=20,
        logger=lambda metrics, step: found.append(float(metrics["loss"])),
        log_interval=1,
        **source,
    )
    torch.manual_seed(1)
    trainer.fit()
    return found


def test_its_trainer_learns_from_the_root_what_it_learns_from_plain_states(
    plain: Plain, tmp_path: Path, single_process: None
) -> None:
    store = LayertapFeatureStore(plain.root, algorithm="dflash")
    refs = store.refs(max_len=MAX_LEN)
    from_root = losses(plain, build_disagg_offline_runtime, tmp_path / "root", feature_store=store, refs=refs)
    folder = dumped(plain, tmp_path / "dumped")
    from_files = losses(plain, build_offline_runtime, tmp_path / "files", hidden_states_path=folder)
    assert_same_training(from_root, from_files)
