"""The engine on one H200: a 27B-shaped Gated DeltaNet hybrid with random weights, into a local folder.

    python benchmarks/gpu_engine.py --seconds 60 --out /tmp/layertap-bench

Row lengths are log-normal with a mean of 264 tokens. Batches are planned, extracted and put as in a real
run, two shards in flight; shards are deleted once their checksums are verified. Before that the same batches
go through the eager forward pass alone, in the same process: clocks differ between runs. Random
weights amplify rounding beyond any tolerance, so a failed self-check is shown and means nothing here.
"""

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from layertap.errors import SelfCheckError
from layertap.extract import Extractor, ShardResult
from layertap.plan import Plan, PlanSettings, estimate, make_plan
from layertap.progress import Clock
from layertap.records import ShardRows
from layertap.spec import ExtractionSpec
from layertap.store import Store, checksum
from layertap.target import Target

MEAN_LENGTH, SIGMA, MAX_LENGTH = 264, 0.9, 4096

SHAPES = {
    "27b": {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
LAYER_IDS = {"27b": (1, 16, 31, 46, 61), "tiny": (1, 3, 6)}


def build(shape: str, device: str) -> torch.nn.Module:
    """The backbone with random weights, made on the device: the host never holds them."""
    config = Qwen3_5TextConfig(
        **SHAPES[shape],
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10] if shape == "27b" else [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = modeling.Qwen3_5TextModel(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    model.rotary_emb = modeling.Qwen3_5TextRotaryEmbedding(config).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.0, 2.0)
            elif name.endswith("dt_bias"):
                parameter.fill_(1.0)
            elif "norm" in name:
                # the gated norm's weight is the scale itself, the others' is its distance from 1
                parameter.fill_(1.0 if "linear_attn.norm" in name else 0.0)
            else:
                parameter.normal_(0, 0.02)
    return model


def shards_of(
    num_rows: int, spec: ExtractionSpec, vocab_size: int, settings: PlanSettings
) -> tuple[list[ShardRows], Plan]:
    """Rows of random tokens, planned: the shards, and the plan."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(MEAN_LENGTH) - SIGMA**2 / 2, SIGMA, num_rows)
    num_tokens = np.clip(np.rint(lengths), 1, MAX_LENGTH).astype(np.int32)
    keys = random.integers(0, 256, (num_rows, 16), dtype=np.uint8)
    plan = make_plan(keys, num_tokens, spec_fingerprint=spec.fingerprint, settings=settings)
    shards = []
    for part in plan.shard_slices():
        tokens = [random.integers(0, vocab_size, n, dtype=np.int32) for n in plan.num_tokens[part]]
        shards.append(ShardRows.of(plan.keys[part], plan.batch[part], tokens))
    return shards, plan


def verify_and_delete(folder: Path, prefix: str, result: ShardResult) -> None:
    """Read a shard back through the page cache, compare checksums, delete it."""
    for file in [*result.files, result.index]:
        data = np.memmap(folder / prefix / file["name"], np.uint8, mode="r")
        if (len(data), checksum(data.data)) != (file["size"], file["checksum"]):
            raise SystemExit(f"{prefix}/{file['name']} isn't what was written")
    shutil.rmtree(folder / prefix)


def dirty_bytes() -> int:
    """Bytes the page cache has still to write."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Dirty", "Writeback"))


def extract_for(
    seconds: float, extractor: Extractor, shards: list[ShardRows], folder: Path
) -> tuple[list[ShardResult], float, int]:
    """Extract shard after shard, two in flight, for about so long; returns results, seconds, dirty bytes."""
    results: list[ShardResult] = []

    def one(number: int) -> None:
        prefix = f"shard-{number:05d}"
        result = extractor.extract_shard(
            shards[number % len(shards)],
            prefix,
            on_progress=lambda *_: None,
            should_stop=lambda: None,
        )
        results.append(result)
        verifying.submit(verify_and_delete, folder, prefix, result).add_done_callback(Future.result)

    start = time.perf_counter()
    with ThreadPoolExecutor(1) as verifying, ThreadPoolExecutor(2) as shards_in_flight:
        running: set[Future[None]] = set()
        number = 0
        while time.perf_counter() - start < seconds:
            while len(running) < 2:
                running.add(shards_in_flight.submit(one, number))
                number += 1
            done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
        for future in running:
            future.result()
        elapsed_s = time.perf_counter() - start
        dirty = dirty_bytes()
    return results, elapsed_s, dirty


def padded_batches(shard: ShardRows, device: torch.device) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Rows, tokens and the padded ids of each batch."""
    for number in np.unique(shard.batch):
        rows = np.flatnonzero(shard.batch == number)
        ids: NDArray[np.int32] = np.zeros((len(rows), shard.num_tokens[rows].max()), np.int32)
        for i, row in enumerate(rows):
            ids[i, : shard.num_tokens[row]] = shard.tokens(int(row))
        yield len(rows), int(shard.num_tokens[rows].sum()), torch.from_numpy(ids).to(device)


def forward_alone(target: Target, shards: list[ShardRows]) -> tuple[float, float]:
    """Tokens and rows a second of the forward pass with nothing copied or stored, over all batches once."""
    batches = [batch for shard in shards for batch in padded_batches(shard, target.device)]
    synchronize(target.device)
    start = time.perf_counter()
    for _, _, ids_BT in batches:
        target.tap(ids_BT)
    synchronize(target.device)
    elapsed_s = time.perf_counter() - start
    return sum(tokens for _, tokens, _ in batches) / elapsed_s, sum(
        rows for rows, _, _ in batches
    ) / elapsed_s


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def watch_memory(peaks: dict[str, float], ended: threading.Event) -> None:
    """Note the process's largest resident memory."""
    while not ended.wait(0.5):
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peaks["host GiB"] = max(peaks.get("host GiB", 0), int(status["VmRSS"].split()[0]) / 2**20)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long to extract")
    parser.add_argument("--out", type=Path, help="folder to write to; a temporary one if not given")
    parser.add_argument("--shape", choices=list(SHAPES), default="27b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--shard-tokens", type=int, default=260_000)
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers for the engine")
    parser.add_argument("--max-batch-tokens", type=int, default=PlanSettings().max_batch_tokens)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.out))

    start = time.perf_counter()
    spec = ExtractionSpec(target_identity="random", layer_ids=LAYER_IDS[options.shape], max_length=MAX_LENGTH)
    target = Target.from_backbone(build(options.shape, options.device), spec=spec)
    print(f"target ready in {time.perf_counter() - start:.1f} s: {target.environment()}", flush=True)
    try:
        print(f"self-check: {target.self_check()}")
    except SelfCheckError as error:
        print(f"self-check: {error}")
    settings = PlanSettings(max_batch_tokens=options.max_batch_tokens, shard_tokens=options.shard_tokens)
    shards, plan = shards_of(options.rows, spec, target.info.vocab_size, settings)
    cost = estimate(
        plan, spec=spec, hidden_size=target.info.hidden_size, num_parameters=target.info.num_parameters
    )
    print(
        f"{cost.num_batches} batches in {len(shards)} shards, mean {plan.num_tokens.mean():.0f} tokens a row"
    )

    start = time.perf_counter()
    # fla tunes a kernel anew for every number of rows in a batch: all shapes must have been seen
    forward_alone(target, shards)
    print(f"kernels warm after {time.perf_counter() - start:.1f} s", flush=True)
    alone_tokens, alone_rows = forward_alone(target, shards)
    if options.compile:
        start = time.perf_counter()
        target.compile()
        forward_alone(target, shards)
        print(f"layers compiled and warm after {time.perf_counter() - start:.1f} s", flush=True)

    peaks: dict[str, float] = {}
    ended = threading.Event()
    watcher = threading.Thread(target=watch_memory, args=(peaks, ended))
    watcher.start()
    clock, store = Clock(), Store.folder(folder)
    try:
        with Extractor(target, store, max_batch_bytes=cost.max_batch_bytes, clock=clock) as extractor:
            results, elapsed_s, dirty = extract_for(options.seconds, extractor, shards, folder)
    finally:
        shutil.rmtree(folder)
        ended.set()
        watcher.join()
    num_tokens, num_rows = sum(r.num_tokens for r in results), sum(r.num_rows for r in results)
    nbytes = sum(r.nbytes for r in results)

    seconds = {**clock.seconds, "other": elapsed_s - sum(clock.seconds.values())}
    spent = ", ".join(f"{on} {s:.1f}" for on, s in sorted(seconds.items(), key=lambda item: -item[1]))
    print(f"extracted {num_rows:,} rows, {num_tokens:,} tokens, {nbytes / 1e9:.1f} GB in {elapsed_s:.1f} s")
    print(f"seconds of the device: {spent}")
    print(f"refused {sum(len(r.refused) for r in results)}, splits {sum(r.num_splits for r in results)}")
    print(f"dirty bytes at the end: {dirty / 1e9:.2f} GB")
    print(f"host memory at most {peaks.get('host GiB', 0):.1f} GiB")
    if target.device.type == "cuda":
        print(f"device memory at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print(f"engine:        {num_tokens / elapsed_s:9,.0f} tokens/s {num_rows / elapsed_s:7.1f} samples/s")
    print(f"eager alone:   {alone_tokens:9,.0f} tokens/s {alone_rows:7.1f} samples/s")
    print(f"ratio:         {num_tokens / elapsed_s / alone_tokens:9.3f}")


if __name__ == "__main__":
    main()
