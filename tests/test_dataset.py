"""Rows come out as they went in, or are refused with number and reason, whatever the file looks like."""

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import layertap.dataset
from layertap.arrow_files import DataFile
from layertap.dataset import Columns, TokenDataset
from layertap.errors import DatasetError

VOCAB_SIZE = 300
INT8, INT32, INT64 = pa.int8(), pa.int32(), pa.int64()
ROWS = [[1, 2, 3], [299], [7, 7], [0, 5, 6, 8], [4]]
MASKS = [[0, 1, 1], [1], [0, 0], [1, 1, 1, 0], [1]]


def write(folder: Path, table: pa.Table, max_rows: int | None = None, num_files: int = 1) -> Path:
    """`table` as a save_to_disk folder, in record batches of at most `max_rows`."""
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-table.num_rows // num_files)
    names = [f"data-{i:05d}.arrow" for i in range(num_files)]
    for i, name in enumerate(names):
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table.slice(i * step, step), max_chunksize=max_rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def table_of(rows, masks=None, ids=None, kind=pa.list_, values=INT32, mask_values=INT8) -> pa.Table:
    columns = {"input_ids": pa.array(rows, kind(values))}
    if masks is not None:
        columns["loss_mask"] = pa.array(masks, kind(mask_values))
    if ids is not None:
        columns["id"] = pa.array(ids)
    return pa.table(columns)


def key_of(ids) -> bytes:
    return hashlib.blake2b(struct.pack(f"<{len(ids)}i", *ids), digest_size=16).digest()


def scan(dataset: TokenDataset, **changes):
    return dataset.scan(**{"vocab_size": VOCAB_SIZE, "max_length": 100, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(
        tmp_path / "data", table_of(ROWS, MASKS, ["a", "b", None, "d", "e"]), max_rows=2, num_files=2
    )


class TestOpen:
    def test_reads_what_save_to_disk_writes(self, tmp_path):
        rows = [[i, i + 1] for i in range(10)]
        saved = datasets.Dataset.from_dict({"input_ids": rows, "text": ["x"] * 10, "id": list(range(10))})
        saved.save_to_disk(tmp_path / "one", num_shards=3)
        dataset = TokenDataset.open(tmp_path / "one")
        assert [dataset.input_ids(i).tolist() for i in range(10)] == rows
        assert [dataset.user_id(i) for i in range(10)] == [str(i) for i in range(10)]
        assert dataset.num_rows == 10 and dataset.has_ids and not dataset.has_loss_mask
        assert dataset.loss_mask(3) is None

    def test_file_order_is_that_of_state_json(self, folder):
        state = json.loads((folder / "state.json").read_text())
        state["_data_files"].reverse()
        (folder / "state.json").write_text(json.dumps(state))
        dataset = TokenDataset.open(folder)
        assert [dataset.input_ids(i).tolist() for i in range(5)] == [*ROWS[3:], *ROWS[:3]]

    def test_splits(self, tmp_path):
        train, test = (datasets.Dataset.from_dict({"input_ids": [row]}) for row in ([1, 2], [3]))
        datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "two")
        datasets.DatasetDict({"train": train}).save_to_disk(tmp_path / "one")
        assert TokenDataset.open(tmp_path / "two", split="test").input_ids(0).tolist() == [3]
        assert TokenDataset.open(tmp_path / "one").input_ids(0).tolist() == [1, 2]
        with pytest.raises(DatasetError, match="holds the splits train, test: name one of them with --split"):
            TokenDataset.open(tmp_path / "two")
        with pytest.raises(DatasetError, match="has no split 'dev'; it holds train, test"):
            TokenDataset.open(tmp_path / "two", split="dev")
        with pytest.raises(DatasetError, match="has no splits .* so 'test' can't be chosen"):
            TokenDataset.open(tmp_path / "two" / "train", split="test")

    def test_parquet_equals_arrow(self, folder, tmp_path, monkeypatch):
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(scratch))
        table = table_of(ROWS, MASKS, ["a", "b", None, "d", "e"]).append_column("text", pa.array(["x"] * 5))
        (tmp_path / "parts").mkdir()
        pq.write_table(table, tmp_path / "all.parquet", row_group_size=2)
        pq.write_table(table[:3], tmp_path / "parts" / "a.parquet")
        pq.write_table(table[3:], tmp_path / "parts" / "b.parquet")
        arrow = TokenDataset.open(folder)
        for path in (tmp_path / "all.parquet", tmp_path / "parts"):
            dataset = TokenDataset.open(path)
            assert [dataset.input_ids(i).tolist() for i in range(5)] == ROWS
            assert [dataset.loss_mask(i).tolist() for i in range(5)] == MASKS
            assert dataset.fingerprint == arrow.fingerprint
            assert list(scratch.iterdir()) == [], "converted files are unlinked as soon as they are mapped"

    def test_parquet_that_does_not_fit_is_refused_before_it_is_converted(self, tmp_path, monkeypatch):
        pq.write_table(table_of(ROWS), tmp_path / "a.parquet")
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 3}))
        with pytest.raises(DatasetError, match=r"takes at least \d+ bytes in .* 3 are free; set TMPDIR"):
            TokenDataset.open(tmp_path / "a.parquet")

    def test_other_column_names(self, tmp_path):
        table = table_of(ROWS, MASKS, ["a"] * 5).rename_columns(["tokens", "mask", "uid"])
        columns = Columns(input_ids="tokens", loss_mask="mask", row_id="uid")
        dataset = TokenDataset.open(write(tmp_path, table), columns=columns)
        assert dataset.input_ids(3).tolist() == ROWS[3] and dataset.loss_mask(3).tolist() == MASKS[3]
        assert dataset.user_id(0) == "a"

    @pytest.mark.parametrize(
        ("columns", "text"),
        [
            (Columns(input_ids="ids"), "has no column 'ids'; it has input_ids. .*--input-ids-column"),
            (Columns(loss_mask="mask"), "has no column 'mask'; it has input_ids. .*--loss-mask-column"),
            (Columns(row_id="uid"), "has no column 'uid'; it has input_ids. .*--id-column"),
        ],
    )
    def test_missing_column(self, tmp_path, columns, text):
        with pytest.raises(DatasetError, match=text):
            TokenDataset.open(write(tmp_path, table_of(ROWS)), columns=columns)

    @pytest.mark.parametrize(
        ("column", "array", "text"),
        [
            (
                "input_ids",
                pa.array([[1.0]]),
                "'input_ids' is list<item: double>, but must hold lists of integers",
            ),
            ("input_ids", pa.array([3]), "'input_ids' is int64, but must hold lists of integers"),
            (
                "loss_mask",
                pa.array([[1.0]]),
                "'loss_mask' is list<item: double>, but must hold lists of integers",
            ),
            ("id", pa.array([1.5]), "'id' is double, but must hold text or integers"),
        ],
    )
    def test_wrong_type(self, tmp_path, column, array, text):
        columns = {"input_ids": pa.array([[1]], pa.list_(INT32)), column: array}
        with pytest.raises(DatasetError, match=text):
            TokenDataset.open(write(tmp_path, pa.table(columns)))

    @pytest.mark.parametrize("column", ["position_ids", "pixel_values"])
    def test_rows_that_a_causal_pass_would_get_wrong(self, tmp_path, column):
        table = table_of(ROWS).append_column(column, pa.array(ROWS))
        with pytest.raises(DatasetError, match=f"has the column {column}, which extraction can't honour"):
            TokenDataset.open(write(tmp_path, table))

    def test_a_mask_in_some_files_only(self, tmp_path):
        pq.write_table(table_of(ROWS), tmp_path / "a.parquet")
        pq.write_table(table_of(ROWS, MASKS), tmp_path / "b.parquet")
        with pytest.raises(
            DatasetError, match=r"b.parquet has the column loss_mask, which .*a.parquet has not"
        ):
            TokenDataset.open(tmp_path)
        pq.write_table(table_of(ROWS), tmp_path / "c.parquet")
        (tmp_path / "a.parquet").unlink()
        with pytest.raises(DatasetError, match="c.parquet has no column 'loss_mask'"):
            TokenDataset.open(tmp_path)

    def test_a_column_name_that_is_there_twice(self, tmp_path):
        table = pa.Table.from_arrays([pa.array(ROWS), pa.array(ROWS)], names=["input_ids", "input_ids"])
        pq.write_table(table, tmp_path / "a.parquet")
        for path in (tmp_path / "a.parquet", write(tmp_path / "arrow", table)):
            with pytest.raises(DatasetError, match="has more than one column 'input_ids': rename or remove"):
                TokenDataset.open(path)

    def test_one_column_for_two_things(self, tmp_path):
        pq.write_table(table_of(ROWS), tmp_path / "a.parquet")
        with pytest.raises(
            DatasetError, match="column 'input_ids' can't be read as input_ids and loss_mask at once"
        ):
            TokenDataset.open(tmp_path, columns=Columns(loss_mask="input_ids"))

    def test_a_column_without_any_value_is_none(self, tmp_path, caplog):
        table = table_of(ROWS)
        for name in ("loss_mask", "id", "attention_mask"):
            table = table.append_column(name, pa.nulls(5))
        pq.write_table(table, tmp_path / "a.parquet")
        plain = TokenDataset.open(write(tmp_path / "plain", table_of(ROWS)))
        assert caplog.messages == []
        for path in (tmp_path / "a.parquet", write(tmp_path / "arrow", table, num_files=2)):
            caplog.clear()
            dataset = TokenDataset.open(path)
            assert not dataset.has_loss_mask and not dataset.has_ids
            assert dataset.loss_mask(0) is None and dataset.user_id(0) is None
            found = scan(dataset)
            assert found.refused == {} and found.fingerprint == plain.fingerprint
            assert found.num_supervised.tolist() == [len(row) for row in ROWS]
            assert caplog.messages == [
                f"column {name!r} holds no value at all: read as if it weren't there"
                for name in ("loss_mask", "id", "attention_mask")
            ]

    def test_a_mask_without_any_value_is_refused_where_a_mask_was_meant(self, tmp_path):
        table = table_of(ROWS).append_column("mask", pa.nulls(5))
        with pytest.raises(DatasetError, match="column 'mask' is null, but must hold lists of integers"):
            TokenDataset.open(write(tmp_path / "named", table), columns=Columns(loss_mask="mask"))
        pq.write_table(table_of(ROWS, MASKS), tmp_path / "a.parquet")
        pq.write_table(table.rename_columns(["input_ids", "loss_mask"]), tmp_path / "b.parquet")
        (tmp_path / "named").rename(tmp_path / ".named")
        with pytest.raises(DatasetError, match="b.parquet: column 'loss_mask' is null, but must hold"):
            TokenDataset.open(tmp_path)

    def test_parquet_in_a_subfolder_is_not_left_out(self, tmp_path):
        for name in ("b.parquet", "sub/a.parquet", "sub/b.parquet", ".cache/c.parquet", "_old/d.parquet"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            pq.write_table(table_of(ROWS), tmp_path / name)
        with pytest.raises(DatasetError, match=r"/sub/a.parquet lies in a subfolder, and only .* give one"):
            TokenDataset.open(tmp_path)
        shutil.rmtree(tmp_path / "sub")
        assert TokenDataset.open(tmp_path).num_rows == 5

    def test_data_that_state_json_does_not_name_is_not_left_out(self, folder):
        shutil.copy(folder / "data-00000.arrow", folder / "cache-1234.arrow")
        assert TokenDataset.open(folder).num_rows == 5
        shutil.copy(folder / "data-00000.arrow", folder / "data-00002.arrow")
        with pytest.raises(DatasetError, match=r"data-00002.arrow is not named by state.json, .* remove it"):
            TokenDataset.open(folder)

    def test_no_dataset(self, tmp_path):
        (tmp_path / "chats.jsonl").write_text("{}")
        with pytest.raises(DatasetError, match="nowhere does not exist"):
            TokenDataset.open(tmp_path / "nowhere")
        with pytest.raises(DatasetError, match="holds neither state.json, dataset_dict.json nor"):
            TokenDataset.open(tmp_path)
        with pytest.raises(DatasetError, match="become a dataset with `layertap prepare`"):
            TokenDataset.open(tmp_path / "chats.jsonl")
        with pytest.raises(DatasetError, match="no rows in .*data-00000.arrow"):
            TokenDataset.open(write(tmp_path / "empty", table_of([])))

    def test_provenance(self, folder):
        assert TokenDataset.open(folder).provenance == {"recorded": False}
        (folder / "provenance.json").write_text('{"responses": "original"}')
        assert TokenDataset.open(folder).provenance == {"recorded": True, "responses": "original"}
        (folder / "provenance.json").write_text("{")
        with pytest.raises(DatasetError, match="provenance.json is not JSON"):
            TokenDataset.open(folder)


def save_over(folder: Path, rows: list[list[int]]) -> None:
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(folder)


class TestCheckUnchanged:
    @pytest.mark.parametrize("num_rows", [1, 900])
    def test_a_folder_saved_over_is_named_with_both_sizes(self, tmp_path, num_rows):
        save_over(tmp_path, ROWS * 100)
        file = next(tmp_path.glob("*.arrow"))
        dataset, before = TokenDataset.open(tmp_path), file.stat().st_size
        dataset.check_unchanged()
        save_over(tmp_path, [[5, 6, 7]] * num_rows)
        with pytest.raises(DatasetError) as caught:
            dataset.check_unchanged()
        assert str(caught.value).startswith(
            f"{file} was overwritten in place since it was opened: it had {before} bytes and has "
            f"{file.stat().st_size}. Start again on the dataset as it is now"
        )

    def test_a_byte_written_is_named(self, folder):
        os.utime(folder / "data-00001.arrow", (1, 1))  # clocks of file systems are too coarse for a test
        dataset = TokenDataset.open(folder)
        dataset.check_unchanged()
        with (folder / "data-00001.arrow").open("r+b") as file:
            file.seek(200)
            file.write(b"x")
        with pytest.raises(DatasetError, match=r"data-00001.arrow was overwritten in .*: it was written to"):
            dataset.check_unchanged()

    def test_a_file_replaced_or_deleted_is_intact(self, folder, tmp_path):
        dataset = TokenDataset.open(folder)
        (tmp_path / "other").write_bytes(b"other")
        (tmp_path / "other").rename(folder / "data-00000.arrow")
        (folder / "data-00001.arrow").unlink()
        dataset.check_unchanged()
        assert [dataset.input_ids(i).tolist() for i in range(5)] == ROWS

    def test_parquet_is_read_from_a_copy(self, tmp_path):
        pq.write_table(table_of(ROWS), tmp_path / "a.parquet")
        dataset = TokenDataset.open(tmp_path)
        (tmp_path / "a.parquet").write_bytes(b"")
        dataset.check_unchanged()
        assert [dataset.input_ids(i).tolist() for i in range(5)] == ROWS

    def test_no_descriptor_outlives_the_dataset(self, folder):
        before = len(os.listdir("/dev/fd"))
        dataset = TokenDataset.open(folder)
        del dataset
        assert len(os.listdir("/dev/fd")) == before


class TestDamage:
    def test_a_file_cut_anywhere_is_named(self, folder):
        path = folder / "data-00001.arrow"
        whole = path.read_bytes()
        for size in range(0, len(whole), 8):
            path.write_bytes(whole[:size])
            with pytest.raises(DatasetError, match=f"data-00001.arrow is cut short: its {size} bytes"):
                TokenDataset.open(folder)

    def test_a_missing_file_is_named(self, folder):
        (folder / "data-00000.arrow").unlink()
        with pytest.raises(DatasetError, match="data-00000.arrow is missing"):
            TokenDataset.open(folder)

    def test_a_folder_not_written_to_its_end(self, tmp_path):
        (tmp_path / "train").mkdir()
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
        with pytest.raises(
            DatasetError, match="train has no state.json: the folder was not written to its end"
        ):
            TokenDataset.open(tmp_path)

    def test_rows_reordered_by_an_index_file_are_not_read_in_another_order(self, folder):
        state = json.loads((folder / "state.json").read_text())
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
        (folder / "state.json").write_text(json.dumps(state))
        with pytest.raises(DatasetError, match="reorders its rows by an index file; save it again"):
            TokenDataset.open(folder)

    def test_cut_parquet_is_named(self, tmp_path):
        pq.write_table(table_of(ROWS), tmp_path / "a.parquet")
        whole = (tmp_path / "a.parquet").read_bytes()
        (tmp_path / "a.parquet").write_bytes(whole[: len(whole) * 6 // 10])
        with pytest.raises(DatasetError, match="a.parquet can't be read: "):
            TokenDataset.open(tmp_path)

    def test_flipped_offsets_are_named_instead_of_read(self, folder):
        path = folder / "data-00000.arrow"
        whole = path.read_bytes()
        offsets = np.array([0, 3, 4], np.int32).tobytes()  # of the first record batch
        assert whole.count(offsets) == 2
        path.write_bytes(whole.replace(offsets, np.array([0, 2**30, 4], np.int32).tobytes(), 1))
        with pytest.raises(DatasetError, match="data-00000.arrow: column 'input_ids' is corrupt"):
            TokenDataset.open(folder)


rows_and_masks = st.lists(
    st.lists(st.tuples(st.integers(0, VOCAB_SIZE - 1), st.integers(0, 1)), min_size=1, max_size=9),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    pairs=rows_and_masks,
    kind=st.sampled_from([pa.list_, pa.large_list, pa.list_view]),
    values=st.sampled_from([pa.int16(), pa.uint16(), INT32, pa.uint32(), INT64, pa.uint64()]),
    mask_values=st.sampled_from([pa.bool_(), INT8, pa.uint8(), INT32, INT64]),
    max_rows=st.integers(1, 13),
    num_files=st.integers(1, 3),
    slice_rows=st.integers(1, 5),
    max_length=st.integers(1, 10),
)
def test_the_same_rows_whatever_the_types_and_chunks(
    tmp_path_factory, pairs, kind, values, mask_values, max_rows, num_files, slice_rows, max_length
):
    rows = [[token for token, _ in pair] for pair in pairs]
    masks = [[bit for _, bit in pair] for pair in pairs]
    typed_masks = [[bool(bit) for bit in mask] for mask in masks] if mask_values == pa.bool_() else masks
    table = table_of(rows, typed_masks, None, kind, values, mask_values)
    base = tmp_path_factory.mktemp("any")
    dataset = TokenDataset.open(write(base / "any", table, max_rows, num_files))
    plain = TokenDataset.open(write(base / "plain", table_of(rows, masks)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layertap.dataset, "BATCH_ROWS", slice_rows)
        found = scan(dataset, max_length=max_length)
    assert [dataset.input_ids(i).tolist() for i in range(len(rows))] == rows
    assert [dataset.loss_mask(i).tolist() for i in range(len(rows))] == masks
    assert dataset.input_ids(0).dtype == np.int32 and dataset.loss_mask(0).dtype == np.uint8
    assert [key.tobytes() for key in found.keys] == [key_of(row[:max_length]) for row in rows]
    assert found.num_tokens.tolist() == [min(len(row), max_length) for row in rows]
    assert found.num_supervised.tolist() == [sum(mask[:max_length]) for mask in masks]
    assert found.num_truncated == sum(len(row) > max_length for row in rows)
    assert found.refused == {}
    assert found.fingerprint == plain.fingerprint == dataset.fingerprint


@pytest.mark.parametrize("values", [INT32, INT64])
def test_fixed_size_lists_with_a_null_row(tmp_path, values):
    rows = [[1, 2], None, [3, 4], [5, 6]]
    fixed = TokenDataset.open(
        write(tmp_path / "f", pa.table({"input_ids": pa.array(rows, pa.list_(values, 2))}))
    )
    plain = TokenDataset.open(write(tmp_path / "p", table_of(rows)))
    assert scan(fixed).keys.tolist() == scan(plain).keys.tolist()
    assert scan(fixed).refused == {1: "row 1: input_ids is null"}
    assert fixed.input_ids(3).tolist() == [5, 6]
    assert fixed.fingerprint == plain.fingerprint


def test_offsets_that_together_overflow_int32():
    large = 2**27
    lists = pa.ListArray.from_arrays(
        pa.array([0, large, large + 3], INT32), pa.array(np.ones(large + 3, np.int8))
    )
    batch = pa.record_batch({"input_ids": lists})
    dataset = TokenDataset([DataFile("x", ["input_ids"], [batch] * 20)], Columns(), None)
    assert dataset.input_ids(39).tolist() == [1, 1, 1]
    assert dataset.num_rows == 40


def test_no_row_beyond_the_ends(folder):
    dataset = TokenDataset.open(folder)
    for row in (-1, 5):
        with pytest.raises(IndexError, match=f"row {row} is outside 0..4"):
            dataset.input_ids(row)


FAULTS = {
    "null row": (None, [1], "input_ids is null"),
    "empty row": ([], [], "input_ids is empty"),
    "null token": ([1, None, 2], [1, 1, 1], "input_ids holds a null at position 1"),
    "negative id": ([1, 2, -1], [1, 1, 1], "token id -1 at position 2 is outside the target's 0..299"),
    "id of the vocabulary's size": ([300], [1], "token id 300 at position 0 is outside the target's 0..299"),
    "id beyond int32": ([2**32 + 5], [1], "token id 4294967301 at position 0 is outside the target's 0..299"),
    "id below int32": ([-(2**40)], [1], "token id -1099511627776 at position 0 is outside"),
    "null mask": ([1], None, "loss_mask is null"),
    "null in the mask": ([1, 2], [1, None], "loss_mask holds a null at position 1"),
    "short mask": ([1, 2], [1], "loss_mask has 1 values for 2 tokens"),
    "long mask": ([1, 2], [1, 1, 0], "loss_mask has 3 values for 2 tokens"),
    "mask of two": ([1, 2], [1, 2], "loss_mask holds 2 at position 1, which is neither 0 nor 1"),
    "mask of minus one": ([1, 2], [-1, 1], "loss_mask holds -1 at position 0, which is neither 0 nor 1"),
    "mask of 257": ([1, 2], [0, 257], "loss_mask holds 257 at position 1, which is neither 0 nor 1"),
}


class TestRefusals:
    @pytest.mark.parametrize("place", ["first", "middle", "last", "alone"])
    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_bad_row_is_refused_and_its_neighbours_are_not(self, tmp_path, fault, place):
        ids, mask, reason = FAULTS[fault]
        at = {"first": 0, "middle": 2, "last": 5, "alone": 0}[place]
        around = [] if place == "alone" else list(range(5))
        rows = [ROWS[i] for i in around]
        masks = [MASKS[i] for i in around]
        rows.insert(at, ids)
        masks.insert(at, mask)
        table = table_of(rows, masks, None, values=INT64, mask_values=INT64)
        found = scan(TokenDataset.open(write(tmp_path, table)))
        assert list(found.refused) == [at]
        assert found.refused[at].startswith(f"row {at}: {reason}")
        good = [i for i in range(len(rows)) if i != at]
        assert [found.keys[i].tobytes() for i in good] == [key_of(rows[i]) for i in good]
        assert [found.num_supervised[i] for i in good] == [sum(masks[i]) for i in good]
        assert found.num_tokens[at] == 0 and found.num_supervised[at] == 0 and not found.keys[at].any()
        assert at not in found.unique()

    @settings(max_examples=100, deadline=None)
    @given(
        choices=st.lists(st.sampled_from([*FAULTS, "good"]), min_size=1, max_size=20),
        slice_rows=st.integers(1, 6),
    )
    def test_any_mixture(self, tmp_path_factory, choices, slice_rows):
        rows = [FAULTS[c][0] if c != "good" else [i % 300, 5] for i, c in enumerate(choices)]
        masks = [FAULTS[c][1] if c != "good" else [0, 1] for c in choices]
        table = table_of(rows, masks, None, values=INT64, mask_values=INT64)
        dataset = TokenDataset.open(write(tmp_path_factory.mktemp("mixed"), table, max_rows=4))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layertap.dataset, "BATCH_ROWS", slice_rows)
            found = scan(dataset)
        assert list(found.refused) == [i for i, c in enumerate(choices) if c != "good"]
        for row, reason in found.refused.items():
            assert reason.startswith(f"row {row}: {FAULTS[choices[row]][2]}")
        for row, choice in enumerate(choices):
            assert found.keys[row].tobytes() == (key_of(rows[row]) if choice == "good" else bytes(16))

    def test_a_bad_id_in_the_part_that_is_cut_off(self, tmp_path):
        found = scan(TokenDataset.open(write(tmp_path, table_of([[1, 2, -100]]))), max_length=2)
        assert found.refused == {0: "row 0: token id -100 at position 2 is outside the target's 0..299"}

    def test_too_long_is_cut_or_refused_as_asked(self, tmp_path):
        dataset = TokenDataset.open(write(tmp_path, table_of(ROWS, MASKS)))
        cut = scan(dataset, max_length=3)
        assert (cut.num_truncated, cut.refused, cut.num_tokens[3]) == (1, {}, 3)
        assert cut.keys[3].tobytes() == key_of(ROWS[3][:3])
        refused = scan(dataset, max_length=3, too_long="refuse")
        assert refused.refused == {3: "row 3: 4 tokens are more than the maximum of 3"}
        assert refused.num_truncated == 0
        assert cut.fingerprint == refused.fingerprint

    def test_padded_rows(self, tmp_path):
        table = table_of(ROWS).append_column("attention_mask", pa.array([[1] * len(row) for row in ROWS]))
        assert scan(TokenDataset.open(write(tmp_path / "whole", table))).refused == {}
        padded = table_of(ROWS[:2]).append_column("attention_mask", pa.array([[0, 1, 1], [1]]))
        assert scan(TokenDataset.open(write(tmp_path / "padded", padded))).refused == {
            0: "row 0: attention_mask is 0 at position 0: tokenise without padding"
        }

    def test_without_a_mask_all_kept_tokens_are_supervised(self, tmp_path):
        found = scan(TokenDataset.open(write(tmp_path, table_of(ROWS))), max_length=2)
        assert found.num_supervised.tolist() == [2, 1, 2, 2, 1]

    def test_a_row_that_is_no_int32_can_not_be_read_by_mistake(self, tmp_path):
        rows, masks = [[2**32 + 5], None, [1, None], [1]], [[1], [1], [1, 1], [256]]
        table = table_of(rows, masks, None, values=INT64, mask_values=INT64)
        dataset = TokenDataset.open(write(tmp_path, table))
        with pytest.raises(DatasetError, match="row 0: input_ids holds 4294967301, which is no int32"):
            dataset.input_ids(0)
        for row in (1, 2):
            with pytest.raises(DatasetError, match=f"row {row}: input_ids is null or holds a null"):
                dataset.input_ids(row)
        with pytest.raises(DatasetError, match="row 3: loss_mask holds 256, which is no uint8"):
            dataset.loss_mask(3)


class TestFingerprint:
    def of(self, tmp_path, *contents, **types) -> str:
        return TokenDataset.open(write(tmp_path, table_of(*contents, **types))).fingerprint

    def test_changes_with_every_content(self, tmp_path):
        ids = ["a", "b", "c", "d", "e"]
        swapped = [ROWS[1], ROWS[0], *ROWS[2:]]
        moved = [[1, 2], [3, 299], *ROWS[2:]]  # the same tokens end to end
        flipped = [[1, 1, 1], *MASKS[1:]]
        contents = [
            (ROWS, MASKS, ids),
            (ROWS, MASKS),
            (ROWS, None, ids),
            (ROWS,),
            (swapped, MASKS, ids),
            (moved, MASKS, ids),
            (ROWS, flipped, ids),
            (ROWS, MASKS, ["ab", "", "c", "d", "e"]),
            (ROWS, MASKS, [None, *ids[1:]]),
            ([None, *ROWS[1:]], MASKS, ids),
            ([[], *ROWS[1:]], MASKS, ids),
            ([[1, None, 3], *ROWS[1:]], MASKS, ids),
            ([[1, 0, 3], *ROWS[1:]], MASKS, ids),
        ]
        assert len({self.of(tmp_path, *content) for content in contents}) == len(contents)

    def test_tells_integers_apart_that_are_equal_in_32_bits(self, tmp_path):
        found = {self.of(tmp_path, [[value]], values=INT64) for value in (5, 5 + 2**32, 5 + 2**33)}
        assert len(found) == 3

    def test_depends_on_nothing_else(self, tmp_path, folder):
        renamed = table_of(ROWS, MASKS, ["a", "b", None, "d", "e"]).rename_columns(["t", "m", "i"])
        columns = Columns(input_ids="t", loss_mask="m", row_id="i")
        other = TokenDataset.open(write(tmp_path / "elsewhere", renamed), columns=columns)
        assert other.fingerprint == TokenDataset.open(folder).fingerprint
        assert self.of(tmp_path / "i", ROWS, None, [1, 2, 3, 4, 5]) == self.of(
            tmp_path / "s", ROWS, None, list("12345")
        )

    @pytest.mark.parametrize("max_rows", [1, 3])
    def test_odd_values_do_not_depend_on_chunks(self, tmp_path, max_rows):
        rows = [[1, None], [2**40], None, [3, -(2**50), None]]
        table = table_of(rows, values=INT64)
        chunked = TokenDataset.open(write(tmp_path / "c", table, max_rows=max_rows))
        assert chunked.fingerprint == TokenDataset.open(write(tmp_path / "w", table)).fingerprint


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), max_size=2), min_size=1, max_size=20),
    settled=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=5),
)
def test_unique_is_the_first_row_of_each_key_that_is_not_settled(tmp_path_factory, rows, settled):
    found = scan(TokenDataset.open(write(tmp_path_factory.mktemp("unique"), table_of(rows))))
    keys = np.frombuffer(b"".join(map(key_of, settled)), np.uint8).reshape(-1, 16)
    known = set(map(tuple, settled))
    expected = []
    for i, row in enumerate(rows):
        if row and tuple(row) not in known:
            known.add(tuple(row))
            expected.append(i)
    assert found.unique(settled=keys).tolist() == expected
    assert found.unique().tolist() == found.unique(settled=np.empty((0, 16), np.uint8)).tolist()
