"""A shard's files hold each row's states once, without padding, whatever goes wrong with other rows."""

import hashlib
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from layertap.errors import DeviceError, StoppedError, StoreError
from layertap.extract import INDEX_SCHEMA, Extractor
from layertap.progress import Clock
from layertap.records import ShardRows
from layertap.spec import ExtractionSpec
from layertap.staging import Slot
from layertap.store import Store, checksum, crc64nvme
from layertap.target import Target
from tests.models import (
    DEVICE,
    VOCAB_SIZE,
    constants,
    no_memory_of_the_driver,
    tiny_hybrid,
    tiny_llama,
)

BATCHES = [[30, 29, 17, 17, 2], [5, 5, 4], [64], [9, 1]]
BUILDERS = {"llama": tiny_llama, "hybrid": tiny_hybrid}


def spec_of(layer_ids=(0, 2, 3), last="pre_norm", dtype="float32"):
    return ExtractionSpec(
        target_identity="folder:0", layer_ids=layer_ids, last_hidden_state=last, dtype=dtype, max_length=64
    )


def target_of(build=tiny_llama, **spec):
    spec = spec_of(**spec)
    return Target.from_backbone(build().to(getattr(torch, spec.dtype)), spec=spec)


def rows_of(batches, seed=0):
    random = np.random.default_rng(seed)
    lengths = [n for batch in batches for n in batch]
    tokens = [random.integers(2, VOCAB_SIZE, n, dtype=np.int32) for n in lengths]
    keys = [
        np.frombuffer(hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), np.uint8) for ids in tokens
    ]
    numbers = [k for k, batch in enumerate(batches) for _ in batch]
    return ShardRows.of(np.stack(keys), np.array(numbers, np.int32), tokens)


def extractor_of(target, store, clock=None, num_slots=3):
    max_batch_bytes = 128 * target.spec.bytes_per_token(target.info.hidden_size)
    return Extractor(
        target, store, max_batch_bytes=max_batch_bytes, clock=clock or Clock(), num_slots=num_slots
    )


def run(extractor, rows, prefix="shard", on_progress=lambda *_: None, should_stop=lambda: None):
    return extractor.extract_shard(rows, prefix, on_progress=on_progress, should_stop=should_stop)


def extract(target, store, rows, **options):
    with extractor_of(target, store) as extractor:
        return run(extractor, rows, **options)


def stored(store, result, prefix="shard"):
    """Every tensor in the files of a result."""
    tensors = {}
    for file in result.files:
        found = load(store.get(f"{prefix}/{file['name']}"))
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def key_of(rows, i):
    return bytes(rows.keys[i]).hex()


@pytest.fixture
def store(tmp_path):
    return Store.folder(tmp_path)


@pytest.mark.parametrize("last", ["pre_norm", "post_norm", "none"])
@pytest.mark.parametrize("name", BUILDERS)
def test_rows_equal_hugging_face_row_by_row(store, name, last):
    model = BUILDERS[name]()
    n = model.config.num_hidden_layers
    layer_ids = (0, n // 2, n - 1)
    rows = rows_of(BATCHES)
    tensors = stored(store, extract(target_of(BUILDERS[name], layer_ids=layer_ids, last=last), store, rows))
    raw = []
    model.model.norm.register_forward_pre_hook(lambda _m, args: raw.append(args[0][0]))
    for i in range(len(rows.keys)):
        ids = torch.tensor(rows.tokens(i))
        with torch.inference_mode():
            row = ids[None].long().to(DEVICE)
            out = model.model(input_ids=row, output_hidden_states=True, use_cache=False)
        layers = [*(state[0] for state in out.hidden_states[1:-1]), raw.pop()]
        key = key_of(rows, i)
        assert torch.equal(tensors[f"{key}/input_ids"], ids)
        close(tensors[f"{key}/hidden_states"], torch.stack([layers[k] for k in layer_ids], dim=1))
        if last == "none":
            assert f"{key}/last_hidden_state" not in tensors
        else:
            expected = layers[-1] if last == "pre_norm" else out.last_hidden_state[0]
            close(tensors[f"{key}/last_hidden_state"], expected)


def close(a, b):
    """Equal but for what the shape of a batch does to rounding; on a GPU kernels round to TF32."""
    b = b.cpu()
    assert a.shape == b.shape
    assert ((a - b).norm(dim=-1) / b.norm(dim=-1)).max() < (1e-4 if DEVICE.type == "cpu" else 1e-2)


def test_rows_of_the_constants_model_are_exact(store):
    rows = rows_of(BATCHES)
    tensors = stored(store, extract(target_of(constants, layer_ids=(0, 2, 4)), store, rows))
    for i in range(len(rows.keys)):
        ids = torch.tensor(rows.tokens(i)).float()
        layers = torch.stack([ids + added for added in (1000, 6000, 15000)], dim=1)
        assert torch.equal(tensors[f"{key_of(rows, i)}/hidden_states"], layers[:, :, None].expand(-1, -1, 64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_stored_states_are_the_bits_that_were_tapped(store, dtype):
    target, rows = target_of(dtype=dtype), rows_of([[7, 6, 3]])
    tensors = stored(store, extract(target, store, rows))
    ids = torch.zeros(3, 7, dtype=torch.int32)
    for i in range(3):
        ids[i, : rows.num_tokens[i]] = torch.tensor(rows.tokens(i))
    *layers, last = [state.cpu() for state in target.tap(ids.to(DEVICE))]
    for i, n in enumerate([7, 6, 3]):
        assert torch.equal(
            tensors[f"{key_of(rows, i)}/hidden_states"], torch.stack([x[i, :n] for x in layers], dim=1)
        )
        assert torch.equal(tensors[f"{key_of(rows, i)}/last_hidden_state"], last[i, :n])
        assert tensors[f"{key_of(rows, i)}/hidden_states"].dtype == getattr(torch, dtype)


def test_no_padding_is_stored(store):
    target, rows = target_of(), rows_of(BATCHES)
    result = extract(target, store, rows)
    data = sum(file["size"] for file in result.files)
    headers = sum(8 + header_nbytes(store, file["name"]) for file in result.files)
    num_tokens = sum(map(sum, BATCHES))
    assert data - headers == num_tokens * target.spec.bytes_per_token(64)
    assert (result.num_rows, result.num_tokens) == (len(rows.keys), num_tokens)
    assert result.nbytes == data + result.index["size"]


def header_nbytes(store, name):
    return int.from_bytes(store.get_range(f"shard/{name}", 0, 8), "little")


def test_files_are_named_by_batch_and_readable_lazily(store, tmp_path):
    result = extract(target_of(), store, rows_of(BATCHES))
    assert [file["name"] for file in result.files] == [f"batch-{k:05d}.safetensors" for k in range(4)]
    assert [file["num_rows"] for file in result.files] == [5, 3, 1, 2]
    for file in result.files:
        with safe_open(tmp_path / "shard" / file["name"], "pt") as opened:
            assert opened.metadata()["layer_ids"] == "[0, 2, 3]"
            assert opened.metadata()["num_rows"] == str(file["num_rows"])


def test_checksums_and_sizes_are_those_of_the_objects(store):
    result = extract(target_of(), store, rows_of(BATCHES))
    for file in [*result.files, result.index]:
        data = store.get(f"shard/{file['name']}")
        assert (file["size"], file["checksum"]) == (len(data), checksum(data))


def test_the_index_gives_each_row_as_one_range(store):
    target, rows = target_of(), rows_of(BATCHES)
    result = extract(target, store, rows)
    tensors = stored(store, result)
    index = pq.read_table(io.BytesIO(store.get("shard/index.parquet")))
    assert index.schema.equals(INDEX_SCHEMA)
    assert [row["extraction_key"] for row in index.to_pylist()] == [bytes(key) for key in rows.keys]
    for row in index.to_pylist():
        data = store.get_range(f"shard/{row['file']}", row["offset"], row["nbytes"])
        assert crc64nvme(data) == row["crc64nvme"]
        key, split = row["extraction_key"].hex(), row["num_tokens"] * 3 * 64 * 4
        layers = torch.frombuffer(bytearray(data[:split]), dtype=torch.float32).view(-1, 3, 64)
        assert torch.equal(layers, tensors[f"{key}/hidden_states"])
        ids = np.frombuffer(data[-row["num_tokens"] * 4 :], np.int32)
        assert np.array_equal(ids, tensors[f"{key}/input_ids"].numpy())


def test_progress_counts_up_to_the_whole_shard(store):
    seen = []
    extract(target_of(), store, rows_of(BATCHES), on_progress=lambda *done: seen.append(done))
    assert seen == sorted(seen) and len(seen) == len(BATCHES)
    assert seen[-1] == (11, sum(map(sum, BATCHES)))


def test_seconds_are_counted_for_the_shard_and_the_device(store):
    clock = Clock()
    with extractor_of(target_of(), store, clock) as extractor:
        result = run(extractor, rows_of(BATCHES))
    assert {"forward", "waiting for data", "waiting for the store"} <= set(result.seconds)
    assert result.seconds["forward"] == pytest.approx(clock.seconds["forward"], rel=0.2, abs=0.01)


POISON = 1


def poisoned_model(value=torch.nan):
    """A model whose embedding of one token isn't finite; rows from `rows_of` don't hold that token."""
    model = tiny_llama()
    model.model.embed_tokens.register_forward_hook(
        lambda _m, args, out: out.masked_fill((args[0] == POISON)[..., None], value)
    )
    return model


@pytest.mark.parametrize("victim", [0, 2, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_refused_alone(store, victim, value):
    rows = rows_of([[30, 29, 17, 17, 9]])
    clean = stored(store, extract(target_of(), store, rows, prefix="clean"), "clean")
    rows.values[rows.offsets[victim] + 3] = POISON
    model = poisoned_model(value)
    target = Target.from_backbone(model, spec=spec_of())

    result = extract(target, store, rows)

    key = key_of(rows, victim)
    reason = "hidden states aren't finite (NaN or infinity)"
    assert result.refused == [{"key": key, "reason": reason, "fault": "data"}]
    tensors = stored(store, result)
    assert tensors.keys() == {name for name in clean if not name.startswith(key)}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, clean[name])
    index = pq.read_table(io.BytesIO(store.get("shard/index.parquet")))
    assert len(index) == result.num_rows == 4
    for row in index.to_pylist():
        data = store.get_range(f"shard/{row['file']}", row["offset"], row["nbytes"])
        assert crc64nvme(data) == row["crc64nvme"], "of the bytes after gaps are closed"
        ids = np.frombuffer(data[-4 * row["num_tokens"] :], np.int32)
        assert np.array_equal(ids, clean[f"{row['extraction_key'].hex()}/input_ids"].numpy())


def test_a_batch_without_a_good_row_leaves_no_file(store):
    rows = rows_of([[4], [3, 2]])
    rows.values[0] = POISON
    result = extract(Target.from_backbone(poisoned_model(), spec=spec_of()), store, rows)
    assert [file["name"] for file in result.files] == ["batch-00001.safetensors"]
    assert not store.exists("shard/batch-00000.safetensors")
    assert [row["key"] for row in result.refused] == [key_of(rows, 0)]


class Tapper:
    """A target whose `tap` does something else first: a device out of memory, a count."""

    def __init__(self, target, before):
        self._target = target
        self._before = before

    def __getattr__(self, name):
        return getattr(self._target, name)

    def tap(self, ids_BT):
        self._before(ids_BT)
        return self._target.tap(ids_BT)


ALLOCATOR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
OUT_OF_MEMORY = [
    ALLOCATOR,
    no_memory_of_the_driver(),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def out_of_memory(when, error=ALLOCATOR):
    def before(ids_BT):
        if when(ids_BT):
            raise error

    return before


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
@pytest.mark.parametrize(("batches", "num_splits"), [(BATCHES, 1), ([[64], *BATCHES], 0)])
def test_out_of_memory_once_changes_no_byte(store, error, batches, num_splits):
    rows = rows_of(batches)
    whole = extract(target_of(constants), store, rows, prefix="whole")
    once = iter([True])
    tapper = Tapper(target_of(constants), out_of_memory(lambda _: next(once, False), error))
    split = extract(tapper, store, rows)
    assert (whole.num_splits, split.num_splits) == (0, num_splits)
    assert [file["checksum"] for file in split.files] == [file["checksum"] for file in whole.files]
    assert split.index == whole.index


def test_other_errors_split_no_batch(store):
    tapper = Tapper(target_of(constants), out_of_memory(lambda _: True, RuntimeError("mat1 and mat2")))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        extract(tapper, store, rows_of(BATCHES))


def test_batches_are_split_until_they_fit(store):
    rows = rows_of([[10, 10, 10, 9, 9, 8, 8]])
    shapes = []

    def before(ids_BT):
        shapes.append(tuple(ids_BT.shape))
        out_of_memory(lambda ids: ids.numel() > 20)(ids_BT)

    result = extract(Tapper(target_of(), before), store, rows)
    assert result.num_rows == 7 and result.refused == []
    assert result.num_splits == 3
    assert [shape for shape in shapes if np.prod(shape) <= 20] == [(1, 10), (2, 10), (2, 9), (2, 8)]


def test_a_row_that_never_fits_is_refused_alone(store):
    rows = rows_of([[40, 12, 11], [13]])
    tapper = Tapper(target_of(), out_of_memory(lambda ids: ids.shape[1] > 20))
    result = extract(tapper, store, rows)
    [refused] = result.refused
    assert refused["key"] == key_of(rows, 0)
    assert refused["reason"] == (
        f"40 tokens don't fit the memory of {DEVICE}, even alone, and are tried again by the next run: "
        "CUDA out of memory. Tried to allocate 1 GiB"
    )
    assert refused["fault"] == "memory"
    assert result.num_rows == 3


def test_a_device_that_lost_its_memory_is_not_blamed_on_rows(store):
    num_taps = iter(range(100))
    tapper = Tapper(target_of(), out_of_memory(lambda _: next(num_taps) > 0))
    message = f"{DEVICE} has no memory for a row of 9 tokens, though it had for one of 9: what else uses it"
    with pytest.raises(DeviceError, match=message):
        extract(tapper, store, rows_of([[9], [9]]))


class Gate:
    """A store whose puts wait for the gate to open, or fail."""

    def __init__(self, store, error=None):
        self._store = store
        self._error = error
        self.open = threading.Event()
        self.addresses = set()

    def put(self, path, data, **options):
        self.addresses.add(np.frombuffer(data, np.uint8).ctypes.data)
        assert self.open.wait(30)
        if self._error:
            raise self._error
        self._store.put(path, data, **options)


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_slow_store_stops_the_device_when_the_slots_are_full(store):
    gate, taps, clock = Gate(store), [], Clock()
    target = Tapper(target_of(), taps.append)
    rows = rows_of([[5, 4]] * 12)
    with extractor_of(target, gate, clock, num_slots=3) as extractor, ThreadPoolExecutor() as pool:
        future = pool.submit(run, extractor, rows)
        wait_until(lambda: len(taps) == 3)
        time.sleep(0.3)
        assert len(taps) == 3
        gate.open.set()
        result = future.result(timeout=30)
    assert result.num_rows == 24 and len(result.files) == 12
    assert len(gate.addresses - {0}) <= 3 + 1  # the slots, and the index
    assert clock.seconds["waiting for the store"] > 0.2


def test_what_the_device_still_computes_is_no_copy(folder_store, monkeypatch):
    monkeypatch.setattr(Slot, "wait_until_computed", lambda _: time.sleep(0.2))
    clock = Clock()
    with extractor_of(target_of(), folder_store, clock) as extractor:
        run(extractor, rows_of(BATCHES[:1]))
    assert clock.seconds["forward"] >= 0.2 > clock.seconds["copying to the host"]


def test_the_next_shard_has_the_device_while_the_first_drains(store):
    gate, taps = Gate(store), []
    target = Tapper(target_of(), taps.append)
    with extractor_of(target, gate, num_slots=4) as extractor, ThreadPoolExecutor() as pool:
        first = pool.submit(run, extractor, rows_of([[5], [4]]), "a")
        wait_until(lambda: len(taps) == 2)
        second = pool.submit(run, extractor, rows_of([[5], [4]], seed=1), "b")
        wait_until(lambda: len(taps) == 4 and not extractor.device_lock.locked())
        assert not first.done() and not second.done()
        gate.open.set()
        assert first.result(30).num_rows == second.result(30).num_rows == 2


def test_two_shards_at_once_take_turns_and_keep_apart(store):
    busy, shards = threading.Lock(), [rows_of(BATCHES * 3, seed=k) for k in range(2)]

    def alone(_ids):
        assert busy.acquire(blocking=False)
        time.sleep(0.002)
        busy.release()

    with extractor_of(Tapper(target_of(constants), alone), store) as extractor, ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda k: run(extractor, shards[k], str(k)), range(2)))
    for k, (rows, result) in enumerate(zip(shards, results, strict=True)):
        tensors = stored(store, result, str(k))
        for i in range(len(rows.keys)):
            assert np.array_equal(tensors[f"{key_of(rows, i)}/input_ids"].numpy(), rows.tokens(i))
            layer = tensors[f"{key_of(rows, i)}/hidden_states"][:, 0, 0].numpy()
            assert np.array_equal(layer, rows.tokens(i) + 1000)


def test_a_store_that_fails_ends_the_shard_with_its_error(store):
    gate = Gate(store, StoreError("503 SlowDown"))
    gate.open.set()
    taps = []
    with extractor_of(Tapper(target_of(), taps.append), gate) as extractor:
        with pytest.raises(StoreError, match="503 SlowDown"):
            run(extractor, rows_of([[5, 4]] * 20))
        assert len(taps) < 20, "the device went on with a shard that was lost"
        gate._error = None
        # every slot came back: the next try, as a scheduler makes it, goes through
        assert run(extractor, rows_of([[5, 4]] * 20), "again").num_rows == 40


class Unreadable(ShardRows):
    def tokens(self, i):
        if i == 5:
            raise OSError("the shard's file is gone")
        return super().tokens(i)


def test_rows_that_cannot_be_read_end_the_shard_with_their_error(store):
    rows = rows_of(BATCHES)
    bad = Unreadable(rows.keys, rows.batch, rows.offsets, rows.values)
    with extractor_of(target_of(), store) as extractor:
        with pytest.raises(OSError, match="the shard's file is gone"):
            run(extractor, bad)
        assert not extractor.device_lock.locked()
        assert run(extractor, rows, "again").num_rows == 11


def test_a_forward_pass_that_fails_ends_the_shard_with_its_error(store):
    calls = iter(range(100))

    def before(_ids):
        if next(calls) in (1, 2, 3, 4):
            raise RuntimeError("CUDA error: an illegal memory access")

    with extractor_of(Tapper(target_of(), before), store) as extractor:
        for attempt in range(4):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                run(extractor, rows_of([[5, 4]] * 3), str(attempt))
        assert run(extractor, rows_of([[5, 4]] * 3), "again").num_rows == 6


def test_a_shard_told_to_stop_ends_and_leaves_nothing_running(store):
    taps = []

    def should_stop():
        if len(taps) == 2:
            raise StoppedError("told to stop")

    before = threading.active_count()
    with extractor_of(Tapper(target_of(), taps.append), store) as extractor:
        with pytest.raises(StoppedError):
            run(extractor, rows_of([[5, 4]] * 20), should_stop=should_stop)
        assert len(taps) == 2
        assert not store.exists("shard/index.parquet")
    while threading.active_count() > before:  # idle threads of the pools end by themselves
        time.sleep(0.01)


def test_a_shard_that_waits_for_the_device_can_be_stopped(store):
    def stop():
        raise StoppedError("told to stop")

    extractor = extractor_of(target_of(), store)
    with extractor, extractor.device_lock, pytest.raises(StoppedError):
        run(extractor, rows_of(BATCHES), should_stop=stop)
