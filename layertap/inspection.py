"""What one thing in a root holds, for a person: a batch file, a shard, a version."""

from typing import Any

from layertap.batch_header import read_header
from layertap.catalog import Catalog, refuse_unknown
from layertap.progress import format_bytes
from layertap.records import from_json
from layertap.shard_state import shard_state
from layertap.store import Store
from layertap.versions import Versions

Facts = list[tuple[str, str]]

MAX_LINES = 20
"""Lines of a list that are shown; the rest is counted."""


def inspect_batch(store: Store, path: str) -> Facts:
    """Header of a batch file: its metadata, its rows with their tensors, and whether it is whole.

    Raises:
        NotFoundError: there is no such object.
        IntegrityError: it isn't a safetensors file.
    """
    size = store.head(path).size
    data = read_header(store, path, size)
    header = from_json(f"{store.uri}/{path}", data)
    metadata: dict[str, str] = header.pop("__metadata__", {})
    rows = _rows(header)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    expected = 8 + len(data) + end
    state = "whole" if size == expected else f"DAMAGED: {size:,} bytes, its header says {expected:,}"
    facts = [("file", f"{store.uri}/{path}"), ("size", f"{format_bytes(size)}, {state}")]
    facts += [(name, value) for name, value in sorted(metadata.items())]
    return facts + [("rows", f"{len(rows):,}"), *_first(rows)]


def _rows(header: dict[str, Any]) -> Facts:
    """Key of each row and its tensors, in the order of the file."""
    tensors: dict[str, list[str]] = {}
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        key, _, what = name.partition("/")
        tensors.setdefault(key, []).append(f"{what} {tensor['dtype']}{tensor['shape']}")
    return [(key, ", ".join(described)) for key, described in tensors.items()]


def inspect_shard(catalog: Catalog, plan_id: str, shard: int) -> Facts:
    """A shard: its rows, its state and the records behind it, and its files once it is committed.

    Raises:
        NotFoundError: there is no such plan.
        InputError: it has no such shard.
    """
    shards = catalog.plan(plan_id).shards
    refuse_unknown(plan_id, [shard], range(len(shards)))
    record = shards[shard]
    names = catalog.snapshot(plan_id).names.get(shard, [])
    facts = [
        ("shard", f"{shard} of plan {plan_id}"),
        ("state", f"{shard_state(names).state}: {', '.join(sorted(names)) or 'never claimed'}"),
        ("rows", f"{record.num_rows:,} in {record.num_batches:,} batches, {record.num_tokens:,} tokens"),
    ]
    if "outcome" not in names:
        return facts
    outcome = catalog.outcome(plan_id, shard)
    facts += [
        (
            "stored",
            f"{outcome.num_rows:,} rows, {outcome.num_tokens:,} tokens, {format_bytes(outcome.nbytes)}",
        ),
        ("by", f"{outcome.lane} on {outcome.host}, {outcome.device}, claim {outcome.claim}"),
        ("from, to", f"{outcome.started_at}, {outcome.ended_at}"),
        ("seconds", ", ".join(f"{kind} {spent:.1f}" for kind, spent in outcome.seconds.items())),
        ("environment", ", ".join(f"{name} {value}" for name, value in outcome.environment.items())),
        ("refused", "; ".join(f"{row['key']}: {row['reason']}" for row in outcome.refused) or "no row"),
    ]
    prefix = catalog.attempt_prefix(plan_id, shard, outcome.attempt)
    files = [
        (f"{prefix}/{f['name']}", f"{f['num_rows']:,} rows, {format_bytes(f['size'])}") for f in outcome.files
    ]
    return facts + _first(files)


def inspect_version(store: Store, number: int) -> Facts:
    """A version's record, and the rows that it lacks.

    Raises:
        CatalogError: there is none of that number.
    """
    versions = Versions(store)
    version = versions.get(number)
    missing = [(f"row {row}", reason) for row, reason in versions.missing(version).items()]
    return [
        (
            "version",
            f"{number} of {store.uri}, published {version.created_at}, after {version.parent or 'none'}",
        ),
        ("complete", "yes" if version.complete else "no"),
        (
            "rows",
            f"{version.num_rows:,}, {version.num_stored:,} of them stored: {version.num_tokens:,} tokens",
        ),
        ("dataset", version.dataset_fingerprint),
        ("provenance", ", ".join(f"{name}: {value}" for name, value in version.provenance.items())),
        ("table of rows", f"{store.uri}/{version.rows['path']}, {format_bytes(version.rows['size'])}"),
        ("missing", f"{len(missing):,} rows"),
        *_first(missing),
    ]


def _first(lines: Facts) -> Facts:
    rest = [("…", f"and {len(lines) - MAX_LINES:,} more")] if len(lines) > MAX_LINES else []
    return lines[:MAX_LINES] + rest
