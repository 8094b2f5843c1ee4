"""Layertap's way of writing states against the usual one: a safetensors file for each sample, in line.

Both get the same states in memory. The usual way slices a sample out, serialises it and writes it before it
turns to the next: `file`, then fsync, on a folder; `put_object` of boto3 on S3. Layertap's way is an
`Extractor` with its slots, checksums and puts, synced on a folder, down to the shard's index.
"""

import os
import shutil
import statistics
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from layertap.bench import Measured, in_turns, median_ratio, seconds_of
from layertap.bench.distance import away
from layertap.bench.null_target import NUM_SLOTS, SPEC, NullTarget, rows_of
from layertap.extract import Extractor
from layertap.object_server import ObjectServer, ServerPorts
from layertap.progress import Clock
from layertap.records import ShardRows
from layertap.store import Store

if TYPE_CHECKING:
    from layertap.target import Target

BATCHES = ((546, 15), (31, 264))
"""Rows and tokens a row of the batches: 503 MB each."""

GOAL = 3.2
"""Of the ratio on S3, for the batch of many short rows."""

NUM_BATCHES = 2
NUM_TRIALS = 3

BUCKET = "layertap-bench"

AWAY_S = 0.02
"""How long an answer of the far S3 is on its way. Of AWS a small object takes 0.1 to 0.2 s, by its guide."""

Write = Callable[[str, bytes], object]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A store, and the usual way of writing there."""

    name: str
    store: Store
    write: Write
    usual: str
    at_least: float | None = None
    """The goal of the ratio for the first of the batches, if it has one."""


def measure(folder: Path) -> list[Measured]:
    """A ratio for each batch and place; needs 25 GB of disk in `folder`."""
    target = NullTarget.made(max(rows * tokens for rows, tokens in BATCHES))
    with object_server(folder) as server, away(server.ports.s3, AWAY_S) as port:
        places = [_on_folder(folder), _on_s3("S3 on loopback", server, server.ports.s3)]
        far = _on_s3(f"S3 {AWAY_S * 1e3:.0f} ms away", server, port)
        races = [*((place, batch) for place in places for batch in BATCHES), (far, BATCHES[0])]
        return [_of_batch([tokens] * rows, target, place) for place, (rows, tokens) in races]


def _on_folder(folder: Path) -> _Place:
    def write(path: str, data: bytes) -> None:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    usual = "a safetensors file a sample, written and synced in line"
    return _Place(name="folder", store=Store.folder(folder), write=write, usual=usual)


@contextmanager
def object_server(folder: Path) -> Iterator[ObjectServer]:
    """The embedded server with a bucket `BUCKET`; its folder is deleted afterwards."""
    state = Path(tempfile.mkdtemp(dir=folder))
    server = ObjectServer.start(state, ports=ServerPorts.free(), buckets=[BUCKET])
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(state)


def _on_s3(name: str, server: ObjectServer, port: int) -> _Place:
    settings = replace(server.settings(BUCKET), endpoint_url=f"http://127.0.0.1:{port}")
    client: Any = server.session().client("s3", endpoint_url=settings.endpoint_url)

    def write(path: str, data: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=path, Body=data)

    usual = "a safetensors file a sample, put by boto3 in line"
    store = Store.s3(settings, server.session())
    return _Place(name=name, store=store, write=write, usual=usual, at_least=GOAL)


def _of_batch(lengths: list[int], target: "Target", place: _Place) -> Measured:
    rows = rows_of([lengths] * NUM_BATCHES)
    num_samples = len(rows.keys)
    max_batch_bytes = sum(lengths) * SPEC.bytes_per_token(target.info.hidden_size)
    with Extractor(
        target, place.store, max_batch_bytes=max_batch_bytes, num_slots=NUM_SLOTS, clock=Clock()
    ) as extractor:
        layertap_s, usual_s = in_turns(
            NUM_TRIALS,
            partial(_timed, place.store, partial(_extract, extractor, rows)),
            partial(_timed, place.store, partial(write_in_line, target, rows, place.write)),
        )
    return Measured(
        name=f"writing {len(lengths)} × {lengths[0]} tokens, {place.name}",
        layertap=num_samples / statistics.median(layertap_s),
        against=num_samples / statistics.median(usual_s),
        unit="samples/s",
        against_what=place.usual,
        ratio=median_ratio(usual_s, layertap_s),
        at_least=place.at_least if (len(lengths), lengths[0]) == BATCHES[0] else None,
        details={
            "layertap_s": layertap_s,
            "usual_s": usual_s,
            "num_samples": num_samples,
            "gigabytes": NUM_BATCHES * max_batch_bytes / 1e9,
        },
    )


def _timed(store: Store, work: Callable[[str], object]) -> float:
    """Seconds of the work under a fresh prefix.

    A folder's files are deleted then. A server's go with the server: it deletes in the background, at the
    cost of the next trial.
    """
    prefix = f"trial-{uuid.uuid4().hex[:8]}"
    elapsed_s = seconds_of(partial(work, prefix))
    if written := store.local_path(prefix):
        shutil.rmtree(written)
    return elapsed_s


def _extract(extractor: Extractor, rows: ShardRows, prefix: str) -> None:
    extractor.extract_shard(rows, prefix, on_progress=lambda *_: None, should_stop=lambda: None)


def write_in_line(target: "Target", rows: ShardRows, write: Write, prefix: str) -> None:
    """Write each sample's states as a file of its own, one after another."""
    num_layers = len(SPEC.layer_ids)
    for first in [0, *(k + 1 for k in range(len(rows.batch) - 1) if rows.batch[k] != rows.batch[k + 1])]:
        of_batch = range(first, first + int((rows.batch == rows.batch[first]).sum()))
        ids_BT = torch.tensor([rows.tokens(row).tolist() for row in of_batch])  # all of one length
        states = target.tap(ids_BT)
        for k, row in enumerate(of_batch):
            tensors = {
                "hidden_states": torch.stack([state[k] for state in states[:num_layers]], dim=1),
                "last_hidden_state": states[num_layers][k].clone(),
                "input_ids": ids_BT[k].to(torch.int32),
            }
            write(f"{prefix}/{row:06d}.safetensors", save(tensors))
