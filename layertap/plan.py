"""Pure planning: which rows share a batch, which batches share a shard, and what it all will take.

Batches are cut from one sort by length over all rows, so padding is a fraction of a percent; whole
batches are then dealt to the least loaded shard, dearest first, so shards cost the same. (Sharding the
rows first and cutting batches inside each shard pads 9 to 44 %.) The cost of a batch is its padded
tokens: attention's quadratic term is about one percent of the work at these lengths.

A plan depends on the set of rows, the settings and the spec alone: not on the order of the rows, and not
on how many lanes will work on it.
"""

import hashlib
import heapq
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.errors import SpecError
from layertap.spec import ExtractionSpec
from layertap.store import PART_BYTES

H200_FLOPS_PER_S = 5.6e14
"""Matrix work of one H200 per second on a 27B hybrid in bf16, decoder layers compiled, batches of 8,192
tokens: 11,500 tokens/s, a little less than docs/gpu.md has. Eager ones reach three quarters of it."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How rows are cut into batches and shards.

    Raises:
        SpecError: a number is below 1 or no integer.
    """

    max_batch_tokens: int = 8192
    """Rows of a batch times its longest row; a longer row is a batch of its own."""

    shard_tokens: int = 2_000_000
    """Tokens of a shard, about; a shard is what is claimed, retried and committed."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int:
                raise SpecError(f"{name} is {value!r}; it must be an integer")
            if value < 1:
                raise SpecError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """K rows in the order in which they are extracted: by shard, by batch, longest first."""

    plan_id: str
    """32 hex digits over spec, settings, the sorted keys, and the generation if it isn't 0."""

    settings: PlanSettings
    spec_fingerprint: str

    rows: NDArray[np.int64]
    """[K] indices into the arrays given to `make_plan`."""

    keys: NDArray[np.uint8]
    """[K, 16] extraction keys."""

    num_tokens: NDArray[np.int32]
    """[K] tokens of each row."""

    batch: NDArray[np.int32]
    """[K] number of the batch within its shard, from 0."""

    shard: NDArray[np.int32]
    """[K] number of the shard, from 0, ascending."""

    num_shards: int

    def shard_slices(self) -> list[slice]:
        """Where the rows of each shard lie; no shard is empty."""
        bounds = np.searchsorted(self.shard, np.arange(self.num_shards + 1)).tolist()
        return [slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]

    def again(self, generation: int) -> "Plan":
        """The same plan under another id, for rows that were withdrawn; generation 0 is this one."""
        plan_id = _plan_id(self.keys, self.spec_fingerprint, self.settings, generation)
        return replace(self, plan_id=plan_id)

    def batch_starts(self) -> NDArray[np.int64]:
        """[batches] where each batch begins; its first row is its longest."""
        is_first = np.ones(len(self.rows), bool)
        is_first[1:] = (self.batch[1:] != self.batch[:-1]) | (self.shard[1:] != self.shard[:-1])
        return np.flatnonzero(is_first)


def make_plan(
    keys: NDArray[np.uint8], num_tokens: NDArray[np.int32], *, spec_fingerprint: str, settings: PlanSettings
) -> Plan:
    """Plan the extraction of rows given by distinct keys [K, 16] and lengths [K], each at least 1."""
    keys = np.ascontiguousarray(keys)
    order = _longest_first(keys, num_tokens)
    lengths = num_tokens[order].astype(np.int64)
    starts = _cut_batches(lengths, settings.max_batch_tokens)
    sizes = np.diff(starts, append=len(lengths))
    num_shards = min(len(starts), -(-int(lengths.sum()) // settings.shard_tokens))
    shard_of = _deal(lengths[starts] * sizes, num_shards)

    row_shard = np.repeat(shard_of, sizes)
    row_batch = np.repeat(_number_within(shard_of, num_shards), sizes)
    by_shard = np.argsort(row_shard, kind="stable")
    rows = order[by_shard]
    return Plan(
        plan_id=_plan_id(keys, spec_fingerprint, settings),
        settings=settings,
        spec_fingerprint=spec_fingerprint,
        rows=rows,
        keys=keys[rows],
        num_tokens=num_tokens[rows].astype(np.int32),
        batch=row_batch[by_shard].astype(np.int32),
        shard=row_shard[by_shard].astype(np.int32),
        num_shards=num_shards,
    )


def _words(keys: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """High and low half of each key; they order keys as their bytes do, on every machine."""
    halves = keys.view(">u8").astype(np.uint64)
    return halves[:, 0], halves[:, 1]


def _longest_first(keys: NDArray[np.uint8], num_tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    high, low = _words(keys)
    return np.lexsort((low, high, -num_tokens.astype(np.int64)))


def _cut_batches(lengths: NDArray[np.int64], max_batch_tokens: int) -> NDArray[np.int64]:
    """Where batches begin in descending lengths: as many rows as fit, padded to the first of them."""
    starts, start = [], 0
    while start < len(lengths):
        starts.append(start)
        start += max(1, max_batch_tokens // int(lengths[start]))
    return np.array(starts, np.int64)


def _deal(costs: NDArray[np.int64], num_shards: int) -> NDArray[np.int64]:
    """[batches] the shard of each: dearest batch first, each to the shard with the least so far."""
    loads = [(0, shard) for shard in range(num_shards)]
    shard_of = np.empty(len(costs), np.int64)
    for batch in np.argsort(-costs, kind="stable").tolist():
        load, shard = loads[0]
        shard_of[batch] = shard
        heapq.heapreplace(loads, (load + int(costs[batch]), shard))
    return shard_of


def _number_within(shard_of: NDArray[np.int64], num_shards: int) -> NDArray[np.int64]:
    """[batches] the number of each batch among those of its shard, in the order of `shard_of`."""
    by_shard = np.argsort(shard_of, kind="stable")
    first = np.searchsorted(shard_of[by_shard], np.arange(num_shards))
    numbers = np.empty(len(shard_of), np.int64)
    numbers[by_shard] = np.arange(len(shard_of)) - first[shard_of[by_shard]]
    return numbers


def _plan_id(
    keys: NDArray[np.uint8], spec_fingerprint: str, settings: PlanSettings, generation: int = 0
) -> str:
    high, low = _words(keys)
    head: dict[str, Any] = {"spec": spec_fingerprint, "settings": asdict(settings)}
    if generation:
        head["generation"] = generation
    digest = hashlib.blake2b(json.dumps(head, sort_keys=True).encode(), digest_size=16)
    digest.update(keys[np.lexsort((low, high))].data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a plan takes, before any of it is done."""

    num_rows: int
    num_tokens: int
    num_batches: int
    num_shards: int

    data_bytes: int
    """Stored states and token ids; file headers come on top, a few hundred bytes a row."""

    padded_tokens: int
    """Tokens the target computes: rows of each batch times its longest row."""

    padding_share: float
    """Share of the computed tokens that is padding; none of it is stored."""

    gpu_hours: float
    """Forward passes alone, summed over GPUs; loading the target comes on top."""

    num_requests: int
    """Puts and multipart calls of batch files, and five for each shard: rows, claim, index, outcome, list."""

    max_batch_bytes: int
    """Data of the largest batch file: what a staging slot must hold beside the header."""

    imbalance: float
    """How much dearer the dearest shard is than the mean one, as a share: 0 is perfect."""


def estimate(
    plan: Plan,
    *,
    spec: ExtractionSpec,
    hidden_size: int,
    num_parameters: int,
    flops_per_s: float = H200_FLOPS_PER_S,
) -> Estimate:
    """What `plan` takes.

    Args:
        plan: the plan.
        spec: what is stored for a token.
        hidden_size: of the target.
        num_parameters: of the matrices a token passes through (no embedding; of experts the active ones).
        flops_per_s: sustained by one GPU in these matrices.
    """
    starts = plan.batch_starts()
    sizes = np.diff(starts, append=len(plan.rows))
    padded = plan.num_tokens[starts].astype(np.int64) * sizes
    tokens = np.add.reduceat(plan.num_tokens, starts, dtype=np.int64) if len(starts) else padded
    batch_bytes = tokens * spec.bytes_per_token(hidden_size)
    loads = np.bincount(plan.shard[starts], weights=padded, minlength=plan.num_shards)
    num_tokens, padded_tokens = int(tokens.sum()), int(padded.sum())
    return Estimate(
        num_rows=len(plan.rows),
        num_tokens=num_tokens,
        num_batches=len(starts),
        num_shards=plan.num_shards,
        data_bytes=int(batch_bytes.sum()),
        padded_tokens=padded_tokens,
        padding_share=1 - num_tokens / padded_tokens if padded_tokens else 0.0,
        gpu_hours=2 * num_parameters * padded_tokens / flops_per_s / 3600,
        num_requests=int(_num_requests(batch_bytes).sum()) + 5 * plan.num_shards,
        max_batch_bytes=int(batch_bytes.max(initial=0)),
        imbalance=float(loads.max() / loads.mean() - 1) if plan.num_shards else 0.0,
    )


def _num_requests(object_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """One put, or start, parts and completion of a multipart upload."""
    num_parts = -(-object_bytes // PART_BYTES)
    return np.where(num_parts > 1, num_parts + 2, 1)
