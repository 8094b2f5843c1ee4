"""Reading what was stored, as trainers do."""

import dataclasses
import json
import os
import pickle
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from torch.utils.data import DataLoader

from layertap import HiddenStates
from layertap.catalog import Catalog
from layertap.errors import CatalogError, FormatError, IntegrityError, NotFoundError
from layertap.records import Root, to_json
from layertap.spec import ExtractionSpec
from layertap.store import S3Settings, Store
from layertap.version_table import NOT_EXTRACTED
from layertap.versions import Versions
from tests.processes import in_fresh_process
from tests.stored import (
    HIDDEN_SIZE,
    SPEC,
    claimed,
    dataset_of,
    extract,
    new_catalog,
    plan_for,
    publish,
    some_rows,
    states_of,
    write_attempt,
)

ROWS = some_rows(24)


@pytest.fixture
def filled(store: Store, tmp_path: Path) -> Store:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(ROWS, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    return store


def assert_is_row(item: dict[str, Any], number: int) -> None:
    tokens, mask = ROWS[number]["input_ids"][:50], ROWS[number]["loss_mask"][:50]
    layers, last = states_of(tokens)
    assert item["row"] == number
    assert (item["input_ids"].dtype, item["input_ids"].tolist()) == (torch.int32, tokens)
    assert (item["loss_mask"].dtype, item["loss_mask"].tolist()) == (torch.uint8, mask)
    for name, expected in (("hidden_states", layers), ("last_hidden_state", last)):
        assert item[name].dtype == torch.bfloat16
        assert torch.equal(item[name], expected)


def test_rows_come_back_bit_for_bit(filled: Store) -> None:
    states = HiddenStates(filled)
    assert len(states) == 24
    assert states.hidden_size == 6
    assert states.num_tokens.tolist() == [min(len(row["input_ids"]), 50) for row in ROWS]
    for i in (5, 0, 23, 5):
        assert_is_row(states[i], i)
    assert_is_row(states[-1], 23)
    for number, item in enumerate(states):
        assert_is_row(item, number)
    with pytest.raises(IndexError, match="row 24 of 24 stored rows"):
        states[24]


def test_safetensors_reads_the_same_files(filled: Store, tmp_path: Path) -> None:
    """Every row, under the key of its tokens, in files without a hole."""
    num_seen = 0
    for info in filled.list("plans"):
        if not info.path.endswith(".safetensors"):
            continue
        path = tmp_path / "copy.safetensors"
        path.write_bytes(filled.get(info.path))
        with safe_open(path, "pt") as file:
            assert file.metadata()["spec_fingerprint"] == SPEC.fingerprint
            keys = {name.split("/")[0] for name in file.keys()}  # noqa: SIM118
            for key in keys:
                tokens = file.get_tensor(f"{key}/input_ids").tolist()
                layers, last = states_of(tokens)
                assert torch.equal(file.get_tensor(f"{key}/hidden_states"), layers)
                assert torch.equal(file.get_tensor(f"{key}/last_hidden_state"), last)
            num_seen += len(keys)
    assert num_seen == 24


@pytest.mark.parametrize("last_hidden_state", ["post_norm", "none"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_specs_come_back_too(
    folder_store: Store, tmp_path: Path, dtype: Any, last_hidden_state: Any
) -> None:
    spec = ExtractionSpec(
        target_identity="folder:0123", layer_ids=(1,), dtype=dtype, last_hidden_state=last_hidden_state
    )
    catalog = new_catalog(folder_store, spec)
    dataset, scan = dataset_of(ROWS[:4], tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog, shard_tokens=10_000)
    claim = claimed(catalog, plan, 0)
    catalog.commit(claim, write_attempt(catalog, claim, spec=spec))
    publish(catalog, dataset, scan)
    for number, item in enumerate(HiddenStates(folder_store)):
        layers, last = states_of(ROWS[number]["input_ids"][:50], spec)
        assert torch.equal(item["hidden_states"], layers)
        assert ("last_hidden_state" in item) == spec.stores_last
        if spec.stores_last:
            assert torch.equal(item["last_hidden_state"], last)


def test_a_row_is_one_range_request(s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = new_catalog(s3_store)
    dataset, scan = dataset_of(ROWS, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    states = HiddenStates(s3_store)
    calls: list[str] = []
    for name in ("get", "get_range", "head", "list", "folders", "exists"):
        method = getattr(Store, name)

        def counted(self: Store, *args: Any, name: str = name, method: Any = method) -> Any:
            calls.append(name)
            return method(self, *args)

        monkeypatch.setattr(Store, name, counted)
    assert_is_row(states[3], 3)
    assert calls == ["get_range"]


def test_on_a_folder_rows_are_mapped_privately(folder_store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(folder_store)
    dataset, scan = dataset_of(ROWS, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    states = HiddenStates(folder_store)
    item = states[2]
    maps = Path("/proc/self/maps").read_text()
    assert str(folder_store.local_path("plans")) in maps
    item["hidden_states"].zero_()
    item["input_ids"].zero_()
    assert_is_row(states[2], 2)


def test_any_number_of_rows_can_be_held(half_filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the descriptors that maps may take, rows are copies; nobody sees a difference."""
    monkeypatch.setattr("layertap.rows.MAX_LIVE_MAPS", 3)
    states = HiddenStates(half_filled, version=1)
    held = list(states)
    assert len(held) > 3
    for item in held:
        assert_is_row(item, item["row"])
    held[-1]["hidden_states"].zero_()
    assert_is_row(states[-1], states[-1]["row"])


def test_a_copy_is_whole_though_a_read_ends_early(
    half_filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of Linux does below 2 GiB."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, nbytes, at: pread(file, min(nbytes, 100), at))
    monkeypatch.setattr("layertap.rows.MAX_LIVE_MAPS", 0)
    for item in HiddenStates(half_filled, version=1):
        assert_is_row(item, item["row"])


def _in_a_list(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return items


@pytest.mark.parametrize(
    ("store", "context"), [("s3", "spawn"), ("s3", "fork"), ("folder", "fork")], indirect=["store"]
)
def test_a_data_loader_with_workers_reads_every_row_once(filled: Store, context: str) -> None:
    in_fresh_process(_load_with_workers, filled, context)


def _load_with_workers(filled: Store, context: str) -> None:
    states = HiddenStates(filled)
    loader = DataLoader(
        states,
        batch_size=5,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=context,
        collate_fn=_in_a_list,
    )
    items = [item for batch in loader for item in batch]
    assert sorted(item["row"] for item in items) == list(range(24))
    for item in items:
        assert_is_row(item, item["row"])


def test_a_pickle_holds_no_rows_and_reads_the_same_version(filled: Store) -> None:
    data = pickle.dumps(HiddenStates(filled))
    assert len(data) < 4000
    assert_is_row(pickle.loads(data)[4], 4)


@pytest.fixture
def catalog(folder_store: Store) -> Catalog:
    return new_catalog(folder_store)


@pytest.fixture
def half_filled(catalog: Catalog, tmp_path: Path) -> Iterator[Store]:
    dataset, scan = dataset_of(ROWS, tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    extract(catalog, plan, [0])
    publish(catalog, dataset, scan)
    yield catalog.store


def test_missing_rows_are_told_and_the_others_keep_their_numbers(half_filled: Store) -> None:
    states = HiddenStates(half_filled, version=1)
    missing = states.missing.to_pydict()
    assert set(missing["reason"]) == {NOT_EXTRACTED}
    assert sorted([*missing["row"], *(item["row"] for item in states)]) == list(range(24))
    for item in states:
        assert_is_row(item, item["row"])


def test_an_incomplete_version_must_be_asked_for(half_filled: Store) -> None:
    with pytest.raises(
        CatalogError, match="has no complete version; the incomplete version 1 can be asked for"
    ):
        HiddenStates(half_filled)


def test_a_version_of_another_spec_is_refused(filled: Store) -> None:
    other = Root(spec=dataclasses.replace(SPEC, layer_ids=(1, 2, 3)), target={})
    filled.put("layertap.json", to_json(other.to_dict()))
    message = f"version 1 of .* is of another extraction .*{SPEC.fingerprint}.* restore the layertap.json"
    with pytest.raises(CatalogError, match=message):
        HiddenStates(filled)


@pytest.mark.parametrize("index", [slice(0, 3), "3", 1.0, [0, 1]])
def test_rows_are_read_by_number(filled: Store, index: Any) -> None:
    states: Any = HiddenStates(filled)
    with pytest.raises(TypeError, match="a stored row is read by its number, not by .*Subset"):
        states[index]
    assert_is_row(states[torch.tensor(3)], 3)


@pytest.mark.parametrize("version", [True, "1"])
def test_a_version_that_is_no_int_is_refused(filled: Store, version: Any) -> None:
    with pytest.raises(CatalogError, match=f"version {version!r} is no version's number"):
        HiddenStates(filled, version=version)


def test_a_root_without_versions_says_so(catalog: Catalog) -> None:
    with pytest.raises(CatalogError, match="has no complete version; no run has published yet"):
        HiddenStates(catalog.store)


def test_a_wrong_address_says_so_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"typo holds no extraction: there is no layertap\.json"):
        HiddenStates(tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def test_a_version_with_nothing_stored_is_empty(catalog: Catalog, tmp_path: Path) -> None:
    publish(catalog, *dataset_of(ROWS, tmp_path / "rows.parquet"))
    states = HiddenStates(catalog.store, version=1)
    assert (len(states), states.hidden_size) == (0, HIDDEN_SIZE)
    assert len(states.missing) == 24


def test_a_dataset_without_masks_reads_ones(catalog: Catalog, tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in ROWS]
    dataset, scan = dataset_of(rows, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    item = HiddenStates(catalog.store)[3]
    assert item["loss_mask"].tolist() == [1] * len(item["input_ids"])


@pytest.mark.parametrize("path", ["layertap.json", "versions/1.json"])
def test_a_newer_major_format_is_refused(half_filled: Store, path: str) -> None:
    values = json.loads(half_filled.get(path))
    half_filled.put(path, to_json({**values, "format_version": "2.1"}))
    with pytest.raises(
        FormatError, match=r"has format 2\.1, newer than 1\.0, which this layertap reads: upgrade"
    ):
        HiddenStates(half_filled, version=1)


def _file_of_first_row(filled: Store) -> str:
    return next(o.path for o in filled.list("plans") if o.path.endswith("batch-00000.safetensors"))


def test_a_file_with_other_bytes_in_a_rows_place_is_named(half_filled: Store) -> None:
    path = _file_of_first_row(half_filled)
    data = half_filled.get(path)
    half_filled.put(path, b"\0" * 8 + data[:-8])
    with pytest.raises(
        IntegrityError, match=rf"{path} is damaged: the \d+ bytes from \d+ don't end with the token"
    ):
        list(HiddenStates(half_filled, version=1))


@pytest.mark.parametrize("region", ["hidden_states", "last_hidden_state", "input_ids"])
def test_a_flipped_bit_is_told_wherever_it_is_in_the_row(filled: Store, region: str) -> None:
    versions = Versions(filled)
    place = versions.rows(versions.get(1)).to_pylist()[7]
    path, first, nbytes = place["file"], place["offset"], place["nbytes"]
    state_nbytes = place["num_tokens"] * HIDDEN_SIZE * 2
    ends = {"hidden_states": 3 * state_nbytes, "last_hidden_state": 4 * state_nbytes, "input_ids": nbytes}
    data = bytearray(filled.get(path))
    data[first + ends[region] - 1] ^= 1
    filled.put(path, data)
    states = HiddenStates(filled)
    with pytest.raises(
        IntegrityError, match=rf"{path} is damaged: the {nbytes} bytes from {first} don't .* of row 7$"
    ):
        states[7]
    for i in set(range(24)) - {7}:
        assert_is_row(states[i], i)


def test_a_file_cut_off_or_gone_is_named(half_filled: Store) -> None:
    path = _file_of_first_row(half_filled)
    half_filled.put(path, half_filled.get(path)[:-1])
    with pytest.raises(IntegrityError, match=rf"{path} is cut off at \d+ bytes"):
        list(HiddenStates(half_filled, version=1))
    half_filled.delete([path])
    with pytest.raises(NotFoundError, match=rf"{path} is gone, though version 1 names it"):
        list(HiddenStates(half_filled, version=1))


def test_a_row_that_arrives_damaged_is_fetched_once_more(
    s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = new_catalog(s3_store)
    dataset, scan = dataset_of(ROWS, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    states = HiddenStates(s3_store)
    get_range, num_calls = Store.get_range, 0

    def damaged_once(self: Store, path: str, offset: int, nbytes: int) -> bytes:
        nonlocal num_calls
        num_calls += 1
        data = bytes(get_range(self, path, offset, nbytes))
        return data if num_calls > 1 else data[:-1] + b"\xff"

    monkeypatch.setattr(Store, "get_range", damaged_once)
    assert_is_row(states[0], 0)
    assert num_calls == 2


def test_neighbours_are_one_request_and_rows_far_apart_several(
    s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = new_catalog(s3_store)
    dataset, scan = dataset_of(ROWS, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    states = HiddenStates(s3_store)
    asked: list[tuple[str, int, int]] = []
    get_range = Store.get_range

    def counted(self: Store, path: str, offset: int, nbytes: int) -> Any:
        asked.append((path, offset, nbytes))
        return get_range(self, path, offset, nbytes)

    monkeypatch.setattr(Store, "get_range", counted)
    wanted = [3, 23, 0, 3, *range(24)]
    for number, item in zip(wanted, states.__getitems__(wanted), strict=True):
        assert_is_row(item, number)
    num_files = len(set(states.places.file))
    assert len(asked) == num_files
    asked.clear()
    monkeypatch.setattr("layertap.rows.MAX_SPAN_BYTES", 3_000)
    states.__getitems__(range(24))
    assert len(asked) > num_files
    assert all(nbytes <= 3_000 for _, _, nbytes in asked)
    asked.clear()
    monkeypatch.setattr("layertap.rows.MAX_GAP_BYTES", -1)
    states.__getitems__(range(24))
    assert len(asked) == 24


def test_the_same_row_asked_twice_is_two_rows(filled: Store) -> None:
    first, second = HiddenStates(filled).__getitems__([4, 4])
    first["hidden_states"].zero_()
    assert_is_row(second, 4)


class _CutsTheFirstAnswer(BaseHTTPRequestHandler):
    """A server of ranges whose connection breaks once in the middle of an answer."""

    protocol_version = "HTTP/1.1"
    body = bytes(range(256)) * 100
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        first, last = (int(k) for k in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.body[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.body)}")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"x"')
        self.end_headers()
        self.asked.append(self.headers["Range"])
        self.close_connection = len(self.asked) == 1
        self.wfile.write(part[:3_000] if self.close_connection else part)

    def log_message(self, *_: Any) -> None:
        """Tell nobody."""


@pytest.mark.parametrize("is_forked", [False, True])
def test_an_answer_that_breaks_off_is_asked_for_again(
    aws_environment: None, monkeypatch: pytest.MonkeyPatch, is_forked: bool
) -> None:
    """Where it broke, or all of it in a forked process."""
    monkeypatch.setattr("layertap.store._forked", lambda: is_forked)
    monkeypatch.setattr(_CutsTheFirstAnswer, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _CutsTheFirstAnswer)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        settings = S3Settings(bucket="bucket", endpoint_url=f"http://127.0.0.1:{server.server_port}")
        data = Store.s3(settings).get_range("x", 100, 20_000)
    finally:
        server.shutdown()
        server.server_close()
    assert bytes(data) == _CutsTheFirstAnswer.body[100:20_100]
    again = "bytes=100-20099" if is_forked else "bytes=3100-20099"
    assert _CutsTheFirstAnswer.asked == ["bytes=100-20099", again]
