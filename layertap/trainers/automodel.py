"""The DSpark cache of NeMo Automodel: padded shards, a manifest, and the target's embedding and head."""

from collections.abc import Iterator
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from layertap.checkpoint import safetensors_header
from layertap.errors import NotFoundError
from layertap.target_files import TargetFiles
from layertap.trainers.layouts import FILE_OVERHEAD_BYTES, Layout, OutFile, write_json
from layertap.trainers.rows import Needs, TrainerRow, TrainerRows

SHARD_ROWS = 256

SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

WEIGHTS = "target_weights.safetensors"


class AutomodelFiles(Layout):
    """Shards of rows padded to one length, a manifest, and the target's embedding and head.

    Args:
        seq_length: tokens to which every row is padded or cut; the recipe must say the same.
        target_model: what the recipe calls the target.
    """

    needs = Needs(trainer="Automodel's DSpark", last="post_norm")

    def __init__(self, *, seq_length: int, target_model: str) -> None:
        self.seq_length = seq_length
        self.target_model = target_model

    def files(self, rows: TrainerRows) -> Iterator[OutFile]:
        """Shards 0..N-1."""
        spec, hidden_size = rows.states.spec, rows.states.hidden_size
        num_states = len(rows.states.layer_ids) + 1
        row_bytes = self.seq_length * (num_states * hidden_size * spec.item_bytes + 16)
        for number, start in enumerate(range(0, len(rows), SHARD_ROWS)):
            part = range(start, min(start + SHARD_ROWS, len(rows)))
            nbytes = len(part) * row_bytes + FILE_OVERHEAD_BYTES
            yield OutFile(name=f"shard-{number:06d}.safetensors", nbytes=nbytes, rows=part)
        vocab_size = TargetFiles(rows.states.store).describe("embed_tokens")["shape"][0]
        nbytes = 2 * vocab_size * hidden_size * spec.item_bytes + FILE_OVERHEAD_BYTES
        yield OutFile(name=WEIGHTS, nbytes=nbytes)

    def write(self, rows: TrainerRows, file: OutFile, path: Path) -> None:
        """A shard, row by row, or the target's weights."""
        if file.rows:
            self._write_shard(rows, file.rows, path)
            return
        files, dtype = TargetFiles(rows.states.store), getattr(torch, rows.states.spec.dtype)
        weights = {
            "embed_tokens.weight": files.weight("embed_tokens").to(dtype),
            "lm_head.weight": files.weight("lm_head").to(dtype).clone(),
        }
        save_file(weights, path)

    def _write_shard(self, rows: TrainerRows, part: range, path: Path) -> None:
        """Rows are put into a file of zeros, which a disk needn't store: a padded shard may be 64 GB."""
        columns = self._columns(rows)
        shapes = {name: (len(part), self.seq_length, *width) for name, (_, width, _) in columns.items()}
        sizes = {name: prod(shapes[name]) * nbytes for name, (_, _, nbytes) in columns.items()}
        header = safetensors_header({name: (columns[name][0], shapes[name], sizes[name]) for name in columns})
        path.write_bytes(header)
        with path.open("r+b") as file:
            file.truncate(len(header) + sum(sizes.values()))
            for i in range(len(part)):
                start = len(header)
                for name, tensor in self._tensors(rows[part[i]]).items():
                    file.seek(start + i * (sizes[name] // len(part)))
                    file.write(tensor[: self.seq_length].contiguous().view(torch.uint8).numpy().data)
                    start += sizes[name]

    def _columns(self, rows: TrainerRows) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Dtype, shape behind the tokens and bytes of an element of each tensor of a shard, in its order."""
        spec, hidden_size = rows.states.spec, rows.states.hidden_size
        dtype, width = SAFETENSORS_DTYPES[spec.dtype], hidden_size * len(rows.states.layer_ids)
        return {
            "input_ids": ("I64", (), 8),
            "loss_mask": ("I64", (), 8),
            "target_hidden_states": (dtype, (width,), spec.item_bytes),
            "target_last_hidden_states": (dtype, (hidden_size,), spec.item_bytes),
        }

    def _tensors(self, row: TrainerRow) -> dict[str, Tensor]:
        assert row.last is not None
        return {
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask,
            "target_hidden_states": row.layers.flatten(1),
            "target_last_hidden_states": row.last,
        }

    def finish(self, rows: TrainerRows, folder: Path) -> None:
        """The manifest, complete."""
        states, files = rows.states, TargetFiles(rows.states.store)
        config = files.config
        text_config = config.get("text_config", config)
        num_layers = len(states.layer_ids)
        write_json(
            folder / "manifest.json",
            {
                "format_version": 1,
                "complete": True,
                "target_model": self.target_model,
                "target_model_type": config["model_type"],
                "target_vocab_size": text_config["vocab_size"],
                "hidden_size": states.hidden_size,
                "num_hidden_layers": text_config["num_hidden_layers"],
                "seq_length": self.seq_length,
                "dtype": DTYPES[states.spec.dtype],
                "num_samples": len(rows),
                "shard_size": SHARD_ROWS,
                "target_hidden_dim": num_layers * states.hidden_size,
                "target_last_hidden_dim": states.hidden_size,
                "target_layer_ids": list(states.layer_ids),
                "train_data_path": f"{states.store.uri} version {states.version.number}",
                "train_split": None,
                "shuffle_seed": 0,
                "mask_reasoning_content": False,
                "mask_generation_prompt": False,
                "chat_template_sha256": _template_sha256(files),
            },
        )


def _template_sha256(files: TargetFiles) -> str:
    """As Automodel hashes the tokenizer's chat template; of an empty one where the target brings none."""
    try:
        template = files.store.get("target/chat_template.jinja")
    except NotFoundError:
        template = b""
    return sha256(template).hexdigest()
