"""A root filled without a target: states are a function of the token ids, everything else is real."""

import hashlib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from layertap.catalog import Catalog, Claim, Outcome, PlanRecord, Root
from layertap.dataset import Scan, TokenDataset
from layertap.keys import key_array
from layertap.plan import Plan, PlanSettings, make_plan
from layertap.records import DATA, MEMORY
from layertap.resume import find_unfinished, take_up
from layertap.spec import ExtractionSpec
from layertap.staging import BatchLayout
from layertap.store import Store, checksum, crc64nvme
from layertap.versions import Version, Versions

SPEC = ExtractionSpec(target_identity="folder:0123", layer_ids=(0, 2, 5), max_length=50)
HIDDEN_SIZE = 6
VOCAB_SIZE = 1000

REASONS = {DATA: "a state is not finite", MEMORY: "no device had memory for it"}

Rows = Sequence[Mapping[str, Any]]


def some_rows(num_rows: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct rows of random tokens, some longer than the spec's maximum, each with a mask and an id.

    More rows of one seed begin with the same rows.
    """
    randoms = [np.random.default_rng([seed, i]) for i in range(num_rows)]
    lengths = [int(random.integers(0, 70)) for random in randoms]
    return [
        {
            "input_ids": [i, *random.integers(0, VOCAB_SIZE, n).tolist()],
            "loss_mask": random.integers(0, 2, n + 1).tolist(),
            "id": f"row-{i}",
        }
        for i, (n, random) in enumerate(zip(lengths, randoms, strict=True))
    ]


def dataset_of(rows: Rows, path: Path) -> tuple[TokenDataset, Scan]:
    """A Parquet dataset of the rows, and its scan."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    dataset = TokenDataset.open(path)
    return dataset, dataset.scan(vocab_size=VOCAB_SIZE, max_length=SPEC.max_length)


def states_of(tokens: Sequence[int], spec: ExtractionSpec = SPEC) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, L, H] and [T, H], different for every row, token, layer and place."""
    seed = int.from_bytes(hashlib.blake2b(str(list(tokens)).encode(), digest_size=6).digest(), "little")
    shape = (len(tokens), len(spec.layer_ids) + 1, HIDDEN_SIZE)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    states = states.to(getattr(torch, spec.dtype))
    return states[:, :-1].contiguous(), states[:, -1].contiguous()


def plan_of_missing(
    scan: Scan, catalog: Catalog, *, shard_tokens: int = 300
) -> tuple[NDArray[np.int64], Plan]:
    """Rows of the dataset that the catalog doesn't hold yet, and a plan of them."""
    chosen = scan.unique(settled=catalog.settled().final_keys)
    settings = PlanSettings(max_batch_tokens=120, shard_tokens=shard_tokens)
    fingerprint = catalog.root().spec.fingerprint
    return chosen, make_plan(
        scan.keys[chosen], scan.num_tokens[chosen], spec_fingerprint=fingerprint, settings=settings
    )


def plan_for(dataset: TokenDataset, scan: Scan, catalog: Catalog, *, shard_tokens: int = 300) -> PlanRecord:
    """Plan what the catalog doesn't hold yet, and write the plan."""
    chosen, plan = plan_of_missing(scan, catalog, shard_tokens=shard_tokens)
    return catalog.put_plan(plan, lambda k: tokens_of(dataset, plan, chosen, k), max_batch_bytes=10**6)


def planned(dataset: TokenDataset, scan: Scan, catalog: Catalog) -> PlanRecord:
    """As a run does: an unfinished plan of what isn't stored, or another one."""
    chosen, plan = plan_of_missing(scan, catalog)
    unfinished = find_unfinished(catalog, plan)

    def tokens(k: int) -> NDArray[np.int32]:
        return tokens_of(dataset, plan, chosen, k)

    return take_up(catalog, plan, unfinished, tokens, max_batch_bytes=10**6)


def tokens_of(dataset: TokenDataset, plan: Plan, chosen: NDArray[np.int64], k: int) -> NDArray[np.int32]:
    """Tokens of the plan's k-th row."""
    return dataset.input_ids(int(chosen[plan.rows[k]]))[: SPEC.max_length]


def new_catalog(store: Store, spec: ExtractionSpec = SPEC) -> Catalog:
    """The catalog of a root that has been made."""
    catalog = Catalog(store)
    catalog.create_root(Root(spec=spec, target={"source": "none", "hidden_size": HIDDEN_SIZE}))
    return catalog


def claimed(
    catalog: Catalog, plan: PlanRecord, shard: int, number: int = 1, *, lane: str = "lane-0"
) -> Claim:
    """A claim that must be there to have."""
    claim = catalog.claim(plan.plan_id, shard, number, lane=lane, details={})
    assert claim is not None
    return claim


def write_attempt(
    catalog: Catalog,
    claim: Claim,
    *,
    attempt: str = "attempt-0",
    refused: Collection[bytes] = (),
    fault: str = DATA,
    spec: ExtractionSpec = SPEC,
) -> Outcome:
    """Write the files of a shard as a lane does; returns the outcome, not yet committed."""
    rows = catalog.shard_rows(claim.plan_id, claim.shard)
    prefix = catalog.attempt_prefix(claim.plan_id, claim.shard, attempt)
    files: list[dict[str, Any]] = []
    index: list[tuple[bytes, int, str, int, int, int]] = []
    for number in range(int(rows.batch[-1]) + 1):
        kept = [i for i in np.flatnonzero(rows.batch == number) if rows.keys[i].tobytes() not in refused]
        layout = BatchLayout.of(
            [rows.keys[i].tobytes().hex() for i in kept],
            [int(rows.num_tokens[i]) for i in kept],
            spec=spec,
            hidden_size=HIDDEN_SIZE,
        )
        name, data = f"batch-{number:05d}.safetensors", bytearray(layout.header())
        for i, offset, nbytes in zip(kept, layout.offsets, layout.nbytes, strict=True):
            layers, last = states_of(rows.tokens(i).tolist(), spec)
            for part in [layers, *([last] if spec.stores_last else [])]:
                data += part.view(torch.uint8).numpy().tobytes()
            data += rows.tokens(i).tobytes()
            crc = crc64nvme(data[offset : offset + nbytes])
            index.append((rows.keys[i].tobytes(), int(rows.num_tokens[i]), name, offset, nbytes, crc))
        catalog.store.put(f"{prefix}/{name}", data, durable=True)
        files.append({"name": name, "size": len(data), "checksum": checksum(data), "num_rows": len(kept)})
    table = _index_table(index)
    catalog.store.put(f"{prefix}/index.parquet", table, durable=True)
    return Outcome(
        kind="committed",
        shard=claim.shard,
        claim=claim.number,
        attempt=attempt,
        lane=claim.lane,
        host="here",
        device="CPU",
        files=files,
        index={"name": "index.parquet", "size": len(table), "checksum": checksum(table)},
        num_rows=len(index),
        num_tokens=sum(row[1] for row in index),
        nbytes=sum(row[4] for row in index),
        refused=[{"key": key.hex(), "reason": REASONS[fault], "fault": fault} for key in refused],
        seconds={"forward": 1.5},
        num_splits=0,
        environment={"torch": torch.__version__},
        started_at="2026-01-01T00:00:00+00:00",
        ended_at="2026-01-01T00:01:00+00:00",
    )


def _index_table(index: list[tuple[bytes, int, str, int, int, int]]) -> bytes:
    keys, num_tokens, names, offsets, nbytes, crcs = zip(*index, strict=True) if index else ((),) * 6
    table = pa.table(
        {
            "extraction_key": key_array(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)),
            "num_tokens": pa.array(num_tokens, pa.int32()),
            "file": pa.array(names, pa.string()),
            "offset": pa.array(offsets, pa.int64()),
            "nbytes": pa.array(nbytes, pa.int64()),
            "crc64nvme": pa.array(crcs, pa.uint64()),
        }
    )
    sink = BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def extract(
    catalog: Catalog,
    plan: PlanRecord,
    shards: Collection[int] | None = None,
    refused: Collection[bytes] = (),
    fault: str = DATA,
) -> None:
    """Claim, write and commit shards of a plan; all of them unless told which."""
    for shard in range(len(plan.shards)) if shards is None else shards:
        claim = claimed(catalog, plan, shard)
        here = {key.tobytes() for key in catalog.shard_rows(plan.plan_id, shard).keys} & set(refused)
        catalog.commit(claim, write_attempt(catalog, claim, refused=here, fault=fault))


def publish(catalog: Catalog, dataset: TokenDataset, scan: Scan, *, parent: int | None = None) -> Version:
    """Publish what the catalog holds of the dataset."""
    return Versions(catalog.store).publish(dataset, scan, catalog.settled(), parent=parent)


def printed_void(text: str) -> list[str]:
    """The arguments of the command that withdraws shards, as a shell reads them from a message."""
    found = re.search("`layertap (void .+?)`", text)
    assert found, text
    return shlex.split(found[1])


def with_huge_masks(monkeypatch: pytest.MonkeyPatch, *, reason: str | None = None) -> None:
    """Let each version end with three rows whose masks have 3 * 10^9 tokens; they are of no row's tokens."""
    rows = Versions.rows
    mask = pa.ListArray.from_arrays([0, 10**9], pa.array(np.zeros(10**9, np.uint8)))

    def with_huge(self: Versions, version: Version, columns: list[str] | None = None) -> pa.Table:
        table = rows(self, version, columns)
        [line] = table.slice(0, 1).to_batches()
        huge = {"loss_mask": mask, "extraction_key": pa.array([bytes(16)], pa.binary(16))}
        huge["reason"] = pa.array([reason], pa.string())
        columns_of_line = [huge.get(name, line[name]) for name in table.column_names]
        extra = pa.table(columns_of_line, table.column_names).cast(table.schema)
        return pa.concat_tables([table, extra, extra, extra])

    monkeypatch.setattr(Versions, "rows", with_huge)
