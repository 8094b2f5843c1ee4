"""Versions: each row of a dataset once, with its place or a reason; nothing older over anything newer."""

import dataclasses
import itertools
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from layertap.catalog import Catalog
from layertap.dataset import TokenDataset
from layertap.errors import AlreadyExistsError, CatalogError, FormatError, IntegrityError
from layertap.records import to_json
from layertap.store import Store
from layertap.version_table import NOT_EXTRACTED
from layertap.versions import Versions
from tests.stored import (
    SPEC,
    claimed,
    dataset_of,
    extract,
    new_catalog,
    plan_for,
    publish,
    some_rows,
    write_attempt,
)


@pytest.fixture
def catalog(folder_store: Store) -> Catalog:
    return new_catalog(folder_store)


def test_a_version_has_every_row_once_with_its_place(store: Store, tmp_path: Path) -> None:
    catalog, rows = new_catalog(store), some_rows(30)
    rows[7] = {**rows[3], "id": "a twin of row-3"}
    dataset, scan = dataset_of(rows, tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    assert plan.num_rows == 29
    extract(catalog, plan)
    version = publish(catalog, dataset, scan)
    assert (version.number, version.parent, version.complete) == (1, None, True)
    assert (version.num_rows, version.num_stored) == (30, 30)
    assert version.num_tokens == sum(min(len(row["input_ids"]), 50) for row in rows)
    assert version.dataset_fingerprint == dataset.fingerprint
    assert version.spec_fingerprint == SPEC.fingerprint
    supervised = [sum(row["loss_mask"][:50]) for row in rows]
    assert version.num_supervised == sum(supervised)
    assert version.num_rows_below_block == sum(n < version.block_tokens for n in supervised) > 0

    table = pq.read_table(BytesIO(store.get(version.rows["path"]))).to_pylist()
    assert [row["index"] for row in table] == list(range(30))
    for found, row in zip(table, rows, strict=True):
        assert found["id"] == row["id"]
        assert found["loss_mask"] == row["loss_mask"][:50]
        assert found["num_tokens"] == min(len(row["input_ids"]), 50)
        assert found["reason"] is None
        assert store.head(found["file"]).size >= found["offset"] + found["nbytes"]
    places = [(row["file"], row["offset"]) for row in table]
    assert places[7] == places[3]
    assert len(set(places)) == 29
    assert Versions(store).missing(version) == {}


def test_missing_rows_carry_their_reasons(catalog: Catalog, tmp_path: Path) -> None:
    rows = some_rows(30)
    rows[4]["input_ids"][0] = 5000
    rows[9]["input_ids"] = rows[9]["loss_mask"] = []
    dataset, scan = dataset_of(rows, tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    refused = catalog.shard_rows(plan.plan_id, 0).keys[0].tobytes()
    left_out = {key.tobytes() for key in catalog.shard_rows(plan.plan_id, 1).keys}
    extract(catalog, plan, set(range(len(plan.shards))) - {1}, refused=[refused])
    version = publish(catalog, dataset, scan)
    assert not version.complete

    expected = {4: scan.refused[4], 9: scan.refused[9]}
    for row, key in enumerate(scan.keys):
        if key.tobytes() == refused:
            expected[row] = "a state is not finite"
        elif key.tobytes() in left_out:
            expected[row] = NOT_EXTRACTED
    assert Versions(catalog.store).missing(version) == expected
    assert version.num_stored == 30 - len(expected)

    extract(catalog, plan, [1])
    whole = publish(catalog, dataset, scan, parent=1)
    assert (whole.number, whole.parent, whole.complete) == (2, 1, True)
    assert sorted(Versions(catalog.store).missing(whole)) == sorted(
        k for k, reason in expected.items() if reason != NOT_EXTRACTED
    )


def test_publishing_twice_is_publishing_once(store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(10), tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    first = publish(catalog, dataset, scan)
    assert publish(catalog, dataset, scan, parent=1) == first
    assert publish(catalog, dataset, scan, parent=None) == first
    assert Versions(store).numbers() == [1]
    assert len(store.list("versions")) == 2


def test_a_provenance_that_was_added_or_mended_is_published(catalog: Catalog, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    dataset, scan = dataset_of(some_rows(10), folder / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    for number, said in enumerate((None, {"responses": "original"}, {"responses": "unknown"}), start=1):
        if said is not None:
            (folder / "provenance.json").write_text(json.dumps(said))
        for parent in (number - 1 or None, number):
            version = publish(catalog, TokenDataset.open(folder), scan, parent=parent)
            assert (version.number, version.parent) == (number, number - 1 or None)
            assert version.provenance == {"recorded": said is not None, **(said or {})}


def test_a_publisher_that_died_between_table_and_record_is_finished_by_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(10), tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    create = Store.create

    def dies(self: Store, path: str, data: bytes) -> None:
        if path.endswith(".json"):
            raise KeyboardInterrupt
        create(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", dies)
        with pytest.raises(KeyboardInterrupt):
            publish(catalog, dataset, scan)
    assert Versions(store).latest(complete=False) is None
    version = publish(catalog, dataset, scan)
    assert version.number == 1
    assert len(Versions(store).rows(version)) == 10


def _damage_masks(store: Store, path: str) -> None:
    table = pq.read_table(BytesIO(store.get(path)))
    ones = [[1] * len(mask) for mask in table["loss_mask"].to_pylist()]
    field = table.schema.field("loss_mask")
    sink = BytesIO()
    pq.write_table(table.set_column(3, field, pa.array(ones, field.type)), sink)
    store.put(path, sink.getvalue())


def test_a_damaged_table_of_a_publisher_that_died_is_not_published(store: Store, tmp_path: Path) -> None:
    catalog = new_catalog(store)
    dataset, scan = dataset_of(some_rows(10), tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    first = publish(catalog, dataset, scan)
    whole = Versions(store).rows(first)
    _damage_masks(store, first.rows["path"])
    store.delete(["versions/1.json"])
    for _ in range(2):
        version = publish(catalog, dataset, scan)
        assert version.rows["path"] != first.rows["path"]
        assert version.rows["path"].startswith(f"versions/{version.content}-")
        assert Versions(store).rows(version) == whole


def test_row_groups_are_cut_by_tokens_too(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows(40)
    rows[9]["input_ids"] = rows[9]["loss_mask"] = []
    dataset, scan = dataset_of(rows, tmp_path / "rows.parquet")
    monkeypatch.setattr("layertap.version_table.ROW_GROUP", 3)
    monkeypatch.setattr("layertap.version_table.ROW_GROUP_TOKENS", 45)
    version = publish(catalog, dataset, scan)
    file = pq.ParquetFile(BytesIO(catalog.store.get(version.rows["path"])))
    groups = [file.read_row_group(k)["num_tokens"].to_pylist() for k in range(file.num_row_groups)]
    assert list(itertools.chain(*groups)) == scan.num_tokens.tolist()
    assert all(len(group) == 1 or sum(group) <= 45 and len(group) <= 3 for group in groups)
    assert max(map(sum, groups)) > 45
    assert max(map(len, groups)) == 3
    masks = Versions(catalog.store).rows(version)["loss_mask"].to_pylist()
    assert masks == [row["loss_mask"][:50] or None for row in rows]


@pytest.mark.parametrize(
    "stray", ["notes.json", ".DS_Store", "._1.json", "1.json~", "old/7.json", "01.json", "7.json.tmp"]
)
def test_stray_files_beside_versions_are_ignored(catalog: Catalog, tmp_path: Path, stray: str) -> None:
    version = publish(catalog, *dataset_of(some_rows(2), tmp_path / "rows.parquet"))
    catalog.store.put(f"versions/{stray}", b"?")
    assert Versions(catalog.store).numbers() == [1]
    assert Versions(catalog.store).latest(complete=False) == version


@pytest.mark.parametrize("field", ["number", "rows", "content", "format_version", "spec_fingerprint"])
def test_a_version_without_a_field_is_damaged(catalog: Catalog, tmp_path: Path, field: str) -> None:
    publish(catalog, *dataset_of(some_rows(2), tmp_path / "rows.parquet"))
    values = json.loads(catalog.store.get("versions/1.json"))
    del values[field]
    catalog.store.put("versions/1.json", to_json(values))
    message = rf"versions/1\.json is damaged: it lacks the field '{field}'"
    with pytest.raises(IntegrityError, match=message):
        Versions(catalog.store).get(1)


@pytest.mark.parametrize("number", [True, "1", 1.0])
def test_a_version_is_asked_for_by_an_int(catalog: Catalog, tmp_path: Path, number: Any) -> None:
    publish(catalog, *dataset_of(some_rows(2), tmp_path / "rows.parquet"))
    with pytest.raises(CatalogError, match=rf"version {number!r} is no version's number: give an int"):
        Versions(catalog.store).get(number)
    assert Versions(catalog.store).get(np.int64(1)).number == 1


def test_a_changed_mask_is_a_new_version_of_the_same_states(catalog: Catalog, tmp_path: Path) -> None:
    rows = some_rows(10)
    dataset, scan = dataset_of(rows, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    first = publish(catalog, dataset, scan)
    flipped = [{**row, "loss_mask": [1 - value for value in row["loss_mask"]]} for row in rows]
    dataset, scan = dataset_of(flipped, tmp_path / "flipped.parquet")
    assert len(scan.unique(settled=catalog.settled().keys)) == 0
    second = publish(catalog, dataset, scan, parent=1)
    assert (second.number, second.complete) == (2, True)
    before, after = (Versions(catalog.store).rows(version).to_pydict() for version in (first, second))
    assert after["loss_mask"] == [row["loss_mask"][:50] for row in flipped]
    assert (after["file"], after["offset"]) == (before["file"], before["offset"])


def test_removed_rows_leave_and_order_follows_the_dataset(catalog: Catalog, tmp_path: Path) -> None:
    rows = some_rows(12)
    dataset, scan = dataset_of(rows, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan)
    fewer = [row for row in reversed(rows) if row["id"] != "row-5"]
    dataset, scan = dataset_of(fewer, tmp_path / "fewer.parquet")
    version = publish(catalog, dataset, scan, parent=1)
    assert version.complete
    assert Versions(catalog.store).rows(version)["id"].to_pylist() == [row["id"] for row in fewer]


def test_an_older_dataset_is_not_published_over_a_newer(catalog: Catalog, tmp_path: Path) -> None:
    older, older_scan = dataset_of(some_rows(10), tmp_path / "older.parquet")
    newer, newer_scan = dataset_of(some_rows(12), tmp_path / "newer.parquet")
    extract(catalog, plan_for(newer, newer_scan, catalog))
    publish(catalog, newer, newer_scan)
    with pytest.raises(
        CatalogError, match="version 1 of another dataset was published at .* start the run again"
    ):
        publish(catalog, older, older_scan, parent=None)
    assert publish(catalog, older, older_scan, parent=1).number == 2


def test_of_two_publishers_at_once_the_older_is_refused(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one gets in just as the older one has found the way free."""
    older, older_scan = dataset_of(some_rows(10), tmp_path / "older.parquet")
    newer, newer_scan = dataset_of(some_rows(12), tmp_path / "newer.parquet")
    extract(catalog, plan_for(newer, newer_scan, catalog))
    create, published = Store.create, []

    def late(self: Store, path: str, data: bytes) -> None:
        if path.endswith(".json") and not published:
            published.append(path)
            publish(catalog, newer, newer_scan)
        create(self, path, data)

    monkeypatch.setattr(Store, "create", late)
    with pytest.raises(CatalogError, match="version 1 of another dataset"):
        publish(catalog, older, older_scan)
    latest = Versions(catalog.store).latest()
    assert latest is not None
    assert (latest.number, latest.dataset_fingerprint) == (1, newer.fingerprint)


def test_a_dataset_without_masks_and_ids_has_none(catalog: Catalog, tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in some_rows(5)]
    dataset, scan = dataset_of(rows, tmp_path / "rows.parquet")
    extract(catalog, plan_for(dataset, scan, catalog))
    table = Versions(catalog.store).rows(publish(catalog, dataset, scan))
    assert table["loss_mask"].null_count == table["id"].null_count == 5


def test_readers_get_the_newest_complete_version(catalog: Catalog, tmp_path: Path) -> None:
    versions = Versions(catalog.store)
    assert versions.newest_number() is None
    assert versions.latest() is None
    dataset, scan = dataset_of(some_rows(10), tmp_path / "rows.parquet")
    publish(catalog, dataset, scan)
    assert versions.latest() is None
    extract(catalog, plan_for(dataset, scan, catalog))
    publish(catalog, dataset, scan, parent=1)
    grown, grown_scan = dataset_of(some_rows(11), tmp_path / "grown.parquet")
    publish(catalog, grown, grown_scan, parent=2)
    latest, newest = versions.latest(), versions.latest(complete=False)
    assert latest is not None and newest is not None
    assert (latest.number, newest.number, versions.newest_number()) == (2, 3, 3)


def test_versions_are_numbers_not_words(catalog: Catalog, tmp_path: Path) -> None:
    dataset, scan = dataset_of(some_rows(2), tmp_path / "rows.parquet")
    version = publish(catalog, dataset, scan)
    for number in (2, 9, 10):
        record = dataclasses.asdict(version) | {"number": number}
        catalog.store.create(f"versions/{number}.json", to_json(record))
    assert Versions(catalog.store).newest_number() == 10
    assert Versions(catalog.store).get(10).number == 10
    with pytest.raises(CatalogError, match="has no version 4; versions there: 1, 2, 9, 10"):
        Versions(catalog.store).get(4)


def test_a_version_of_a_newer_major_format_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    dataset, scan = dataset_of(some_rows(2), tmp_path / "rows.parquet")
    publish(catalog, dataset, scan)
    values = json.loads(catalog.store.get("versions/1.json"))
    catalog.store.put("versions/1.json", to_json({**values, "format_version": "2.0"}))
    with pytest.raises(FormatError, match=r"version 1 has format 2\.0"):
        Versions(catalog.store).latest(complete=False)
    for odd in ("latest", "", None, "1.x"):
        catalog.store.put("versions/1.json", to_json({**values, "format_version": odd}))
        with pytest.raises(
            FormatError, match=f"version 1 has the format_version {odd!r}, which is no number"
        ):
            Versions(catalog.store).get(1)


def test_a_damaged_table_is_named(catalog: Catalog, tmp_path: Path) -> None:
    dataset, scan = dataset_of(some_rows(2), tmp_path / "rows.parquet")
    version = publish(catalog, dataset, scan)
    catalog.store.put(version.rows["path"], catalog.store.get(version.rows["path"])[:-1])
    with pytest.raises(IntegrityError, match=version.rows["path"]):
        Versions(catalog.store).rows(version)


def test_versions_are_created_once(catalog: Catalog, tmp_path: Path) -> None:
    dataset, scan = dataset_of(some_rows(2), tmp_path / "rows.parquet")
    version = publish(catalog, dataset, scan)
    for path in ("versions/1.json", version.rows["path"]):
        with pytest.raises(AlreadyExistsError):
            catalog.store.create(path, b"{}")


def test_an_uncommitted_attempt_is_in_no_version(catalog: Catalog, tmp_path: Path) -> None:
    dataset, scan = dataset_of(some_rows(10), tmp_path / "rows.parquet")
    plan = plan_for(dataset, scan, catalog)
    write_attempt(catalog, claimed(catalog, plan, 0))
    assert publish(catalog, dataset, scan).num_stored == 0
