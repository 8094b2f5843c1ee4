"""Tokens and masks of a version as a folder of `datasets.save_to_disk`, without reading a state."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from layertap.catalog import Catalog
from layertap.keys import keys_of
from layertap.reader import HiddenStates
from layertap.trainers.rows import TrainerRows
from layertap.versions import Versions

BATCH_ROWS = 1000

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int64())),
        pa.field("loss_mask", pa.list_(pa.int64())),
        pa.field("seq_len", pa.int64()),
    ]
)


def write_tokens(rows: TrainerRows, path: Path) -> None:
    """Write an Arrow stream of `input_ids`, `loss_mask` and `seq_len`, a line for each row."""
    tokens = _tokens_by_key(rows.states)
    with pa.ipc.new_stream(str(path), SCHEMA) as writer:
        for batch in rows.lines(["extraction_key", "loss_mask"]).to_batches(max_chunksize=BATCH_ROWS):
            writer.write_batch(_batch(batch, tokens))


def _batch(batch: pa.RecordBatch, tokens: dict[bytes, NDArray[np.int32]]) -> pa.RecordBatch:
    keys = keys_of(batch.column("extraction_key"))
    ids = [tokens[key.tobytes()] for key in keys]
    masks = [_mask(cell, len(row)) for cell, row in zip(batch.column("loss_mask"), ids, strict=True)]
    lengths = [len(row) for row in ids]
    columns: list[Any] = [_lists(ids, lengths), _lists(masks, lengths), pa.array(lengths, pa.int64())]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _mask(cell: Any, num_tokens: int) -> NDArray[Any]:
    return np.ones(num_tokens, np.uint8) if cell.values is None else cell.values.to_numpy()


def _lists(rows: list[NDArray[Any]], lengths: list[int]) -> Any:
    values = pa.array(np.concatenate(rows).astype(np.int64))
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), values)


def _tokens_by_key(states: HiddenStates) -> dict[bytes, NDArray[np.int32]]:
    """Token ids of all stored rows by extraction key, from the plans: 4 bytes a token stay in memory."""
    catalog = Catalog(states.store)
    return {
        key.tobytes(): shard.tokens(i)
        for plan_id, number in _shards_of(states)
        for shard in [catalog.shard_rows(plan_id, number)]
        for i, key in enumerate(shard.keys)
    }


def _shards_of(states: HiddenStates) -> Iterator[tuple[str, int]]:
    """Plan and number of each shard whose files the version names."""
    file: Any = Versions(states.store).rows(states.version, ["file"])["file"].unify_dictionaries()
    shards = defaultdict(set)
    for path in file.combine_chunks().dictionary.to_pylist():
        _, plan_id, _, number, *_ = str(path).split("/")
        shards[plan_id].add(int(number))
    return ((plan_id, number) for plan_id in sorted(shards) for number in sorted(shards[plan_id]))


def save_dataset_metadata(folder: Path, data_file: str, *, fingerprint: str) -> None:
    """What `datasets.load_from_disk` wants beside the data; columns come out as torch tensors."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": data_file}],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(state, indent=2))
