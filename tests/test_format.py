"""docs/format.md is enough to read a root: here is a reader written from it, without layertap.

Nothing above "What it must read" may import layertap.
"""

import hashlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x9A6C9329AC4BC9B5 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = _crc_table()
ONES = 2**64 - 1


def crc64nvme(data: bytes) -> int:
    crc = ONES
    for byte in data:
        crc = (crc >> 8) ^ CRC_TABLE[(crc ^ byte) & 255]
    return crc ^ ONES


def blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class MiniReader:
    """A root on a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        record = self._record("layertap.json")
        self.spec = record["spec"]
        named = {**self.spec, "format": record["format_version"].split(".")[0]}
        text = json.dumps(named, sort_keys=True, separators=(",", ":"))
        assert blake2b(text.encode()).hex() == record["spec_fingerprint"]
        self.hidden_size = record["target"]["hidden_size"]
        self.version = self._newest_complete()
        assert self.version["spec_fingerprint"] == record["spec_fingerprint"]
        table = root / self.version["rows"]["path"]
        assert table.stat().st_size == self.version["rows"]["size"]
        assert f"crc64nvme:{crc64nvme(table.read_bytes()):016x}" == self.version["rows"]["checksum"]
        self.rows: list[dict[str, Any]] = pq.read_table(table).to_pylist()

    def _record(self, path: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.root / path).read_bytes())
        assert int(record["format_version"].split(".")[0]) == 1
        return record

    def _newest_complete(self) -> dict[str, Any]:
        names = [re.fullmatch(r"([1-9][0-9]*)\.json", p.name) for p in (self.root / "versions").iterdir()]
        for number in sorted((int(name[1]) for name in names if name), reverse=True):
            version = self._record(f"versions/{number}.json")
            if version["complete"]:
                return version
        raise AssertionError("no complete version")

    def states(self, data: bytes, *shape: int) -> np.ndarray[Any, Any]:
        """States as float32, exact for each of the dtypes."""
        if self.spec["dtype"] == "bfloat16":
            return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
        dtype = {"float16": "<f2", "float32": "<f4"}[self.spec["dtype"]]
        return np.frombuffer(data, dtype).astype("<f4").reshape(shape)

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        with (self.root / row["file"]).open("rb") as file:
            file.seek(row["offset"])
            data = file.read(row["nbytes"])
        assert crc64nvme(data) == row["crc64nvme"]
        num_tokens, num_layers = row["num_tokens"], len(self.spec["layer_ids"])
        stores_last = self.spec["last_hidden_state"] != "none"
        state_bytes = num_tokens * self.hidden_size * ITEM_BYTES[self.spec["dtype"]]
        assert row["nbytes"] == (num_layers + stores_last) * state_bytes + 4 * num_tokens
        layers_end = num_layers * state_bytes
        ids = data[-4 * num_tokens :]
        assert blake2b(ids) == row["extraction_key"]
        return {
            "input_ids": np.frombuffer(ids, "<i4").tolist(),
            "loss_mask": row["loss_mask"],
            "hidden_states": self.states(data[:layers_end], num_tokens, num_layers, self.hidden_size),
            "last_hidden_state": self.states(data[layers_end : -4 * num_tokens], num_tokens, self.hidden_size)
            if stores_last
            else None,
        }

    def header(self, path: str) -> tuple[int, dict[str, Any]]:
        """Where the data of a batch file begins, and its header."""
        data = (self.root / path).read_bytes()
        length = int.from_bytes(data[:8], "little")
        return 8 + length, json.loads(data[8 : 8 + length])


# What it must read

from layertap.catalog import Catalog  # noqa: E402
from layertap.keys import extraction_key  # noqa: E402
from layertap.records import Root  # noqa: E402
from layertap.spec import ExtractionSpec  # noqa: E402
from layertap.store import Store  # noqa: E402
from layertap.target_info import TargetInfo  # noqa: E402
from tests.stored import (  # noqa: E402
    HIDDEN_SIZE,
    claimed,
    dataset_of,
    plan_for,
    publish,
    some_rows,
    states_of,
    write_attempt,
)

ROWS = [*some_rows(20), some_rows(20)[4]]
"""The last one has the tokens of another."""

PAGE = (Path(__file__).parent.parent / "docs" / "format.md").read_text()


def fill(store: Store, folder: Path, spec: ExtractionSpec) -> None:
    """A complete version without one refused row, and an incomplete one after it."""
    catalog = Catalog(store)
    catalog.create_root(Root(spec=spec, target={"hidden_size": HIDDEN_SIZE}))
    dataset, scan = dataset_of(ROWS, folder / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    for shard in range(len(plan.shards)):
        claim = claimed(catalog, plan, shard)
        refused = {scan.keys[7].tobytes()} & {
            k.tobytes() for k in catalog.shard_rows(plan.plan_id, shard).keys
        }
        catalog.commit(claim, write_attempt(catalog, claim, spec=spec, refused=refused))
    publish(catalog, dataset, scan)
    more, more_scan = dataset_of(some_rows(25), folder / "more" / "rows.parquet")
    publish(catalog, more, more_scan, parent=1)


@pytest.mark.parametrize(
    ("dtype", "last"), [("bfloat16", "pre_norm"), ("float16", "none"), ("float32", "post_norm")]
)
def test_a_reader_written_from_the_page_reads_every_row(tmp_path: Path, dtype: Any, last: Any) -> None:
    spec = ExtractionSpec(
        target_identity="folder:0123", layer_ids=(0, 2, 5), dtype=dtype, last_hidden_state=last, max_length=50
    )
    fill(Store.folder(tmp_path / "root"), tmp_path, spec)
    reader = MiniReader(tmp_path / "root")
    assert [row["index"] for row in reader.rows] == list(range(21))
    assert reader.rows[20]["offset"] == reader.rows[4]["offset"]
    for row, of_dataset in zip(reader.rows, ROWS, strict=True):
        assert (row["file"] is None) == (row["reason"] is not None) == (row["index"] == 7)
        assert row["id"] == of_dataset["id"]
        if row["file"] is None:
            continue
        tokens = of_dataset["input_ids"][:50]
        read, (layers, last_state) = reader.read(row), states_of(tokens, spec)
        assert (read["input_ids"], read["loss_mask"]) == (tokens, of_dataset["loss_mask"][:50])
        assert np.array_equal(read["hidden_states"], layers.float().numpy())
        if last != "none":
            assert np.array_equal(read["last_hidden_state"], last_state.float().numpy())


def test_headers_say_what_versions_say(tmp_path: Path) -> None:
    fill(
        Store.folder(tmp_path / "root"),
        tmp_path,
        ExtractionSpec(target_identity="x", layer_ids=(1,), max_length=50),
    )
    reader = MiniReader(tmp_path / "root")
    for row in reader.rows:
        if row["file"] is None:
            continue
        data_begin, header = reader.header(row["file"])
        key = row["extraction_key"].hex()
        first, last = header[f"{key}/hidden_states"], header[f"{key}/input_ids"]
        assert (first["dtype"], first["shape"]) == ("BF16", [row["num_tokens"], 1, HIDDEN_SIZE])
        assert data_begin % 64 == 0
        assert data_begin + first["data_offsets"][0] == row["offset"]
        assert data_begin + last["data_offsets"][1] == row["offset"] + row["nbytes"]
        assert json.loads(header["__metadata__"]["layer_ids"]) == [1]


def test_the_page_has_every_field_of_the_target_and_no_other() -> None:
    table = PAGE.partition("| field of `target` |")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:]))
    assert sorted(names) == sorted(f.name for f in fields(TargetInfo))


def test_the_vectors_on_the_page_are_right() -> None:
    section = PAGE.partition("## Checksums")[2].partition("\n## ")[0]
    found = re.findall(r"\| (.+?) +\| `([0-9a-f]{16})` \|", section)
    inputs = {
        "none": b"",
        "`123456789` in ASCII": b"123456789",
        "32 zero bytes": bytes(32),
        "0 to 255": bytes(range(256)),
    }
    assert {name: int(crc, 16) for name, crc in found} == {n: crc64nvme(b) for n, b in inputs.items()}
    keys = re.findall(r"\| ([0-9, ]+) \| `([0-9a-f]{32})` \|", PAGE)
    assert len(keys) == 2
    for ids, key in keys:
        token_ids = np.array(json.loads(f"[{ids}]"), "<i4").tobytes()
        assert blake2b(token_ids).hex() == extraction_key(token_ids).hex() == key
    [(text, fingerprint)] = re.findall(r'```\n(\{"dtype".*\})\n([0-9a-f]{32})\n```', PAGE)
    assert blake2b(text.encode()).hex() == fingerprint
