"""The forward pass: a row at a time and in a plan's batches, as Hugging Face runs it, and as layertap does.

The target has random weights and as many layers of its shape as the device has memory for; nothing is copied
or stored. Layers are compiled in place, so eager and compiled can't take turns: compare within a run. The
ceiling is a large matrix product, taken before and after; the better of the two counts.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from layertap.bench import Measured, seconds_of
from layertap.bench.engine import batches_of
from layertap.bench.null_target import MAX_LENGTH, MEAN_LENGTH, planned
from layertap.bench.random_targets import LAYER_IDS, SHAPES, build, layers_that_fit
from layertap.gpu_caches import use_caches
from layertap.kernels import keep_gpu_kernels_out
from layertap.plan import PlanSettings
from layertap.spec import ExtractionSpec
from layertap.target import Target

SHAPE = "27b"
PLAN_ROWS = 100_000
NUM_BATCHES = 8
NUM_TRIALS = 3

GOAL = 1.3
"""Times eager, on an H200."""

Batch = tuple[int, int, torch.Tensor]
"""Rows, tokens without padding, and padded ids [B, T] on the device."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured, in the order of the fields."""

    one_row: list[float]
    """Tokens a second of each trial: eager, a row of the plan's mean length at a time."""

    eager: list[float]
    layertap: list[float]

    ceilings: list[float]
    """FLOP a second of a matrix product, before and after."""

    details: dict[str, Any]


def measure(shape: str = SHAPE, device: str = "cuda", settings: PlanSettings | None = None) -> list[Measured]:
    """Layertap's tokens a second against eager ones, and against the matrix product.

    Args:
        shape: a key of `SHAPES`.
        device: where the target runs.
        settings: of the plan whose batches run.

    Raises:
        InputError: the device has no memory for four layers.
        TargetError: a kernel isn't installed.
        SelfCheckError: what is computed is wrong.
    """
    settings = settings or PlanSettings()
    target = random_target(shape, torch.device(device))
    num_layers = f"{target.info.num_hidden_layers} of {SHAPES[shape]['num_hidden_layers']}"
    return compared(target, f"{shape} shape, {num_layers} layers", settings)


def random_target(shape: str, device: torch.device) -> Target:
    """A target of that shape, with as many layers as fit; the layers of a real run, as far as there are."""
    if device.type == "cuda":
        use_caches(device)
        free_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        keep_gpu_kernels_out()
        free_bytes = psutil.virtual_memory().available
    num_layers = layers_that_fit(shape, free_bytes)
    layer_ids = tuple(k for k in LAYER_IDS[shape] if k < num_layers)
    spec = ExtractionSpec(target_identity="random", layer_ids=layer_ids, max_length=MAX_LENGTH)
    return Target.from_backbone(build(shape, device, num_layers), spec=spec)


def compared(target: Target, what: str, settings: PlanSettings) -> list[Measured]:
    """A ratio against eager batches, one against a row at a time, and the share of the ceiling."""
    rates = _rates(target, settings)
    flops_per_token = 2 * target.info.executed_parameters(target.spec)  # attention itself isn't counted
    ceiling = max(rates.ceilings) / flops_per_token

    def against(usual: str, trials: list[float], at_least: float | None = None) -> Measured:
        ours, theirs = statistics.median(rates.layertap), statistics.median(trials)
        return Measured(
            name=f"forward, {what}",
            layertap=ours,
            against=theirs,
            unit="tokens/s",
            against_what=f"eager, {usual}: {theirs / ceiling:.2f} of the ceiling",
            ratio=ours / theirs,
            at_least=at_least,
            details={"layertap": rates.layertap, "against": trials, "share_of_ceiling": theirs / ceiling},
        )

    return [
        against("the same batches", rates.eager, GOAL),
        against(f"a row of {MEAN_LENGTH} at a time", rates.one_row),
        Measured(
            name=f"forward, {what}, share of the ceiling",
            layertap=statistics.median(rates.layertap) * flops_per_token / 1e12,
            against=max(rates.ceilings) / 1e12,
            unit="TFLOP/s",
            against_what="the matrix product alone, the better of before and after",
            ratio=statistics.median(rates.layertap) / ceiling,
            details={"flops_per_token": flops_per_token, "ceilings": rates.ceilings, **rates.details},
        ),
    ]


def _rates(target: Target, settings: PlanSettings) -> Rates:
    size = target.info.hidden_size
    batches = _batches(target, settings)
    ceilings = [matmul_flops_per_s(target.device, size)]
    one_row = _trials(target, batch_of((1, MEAN_LENGTH), target))
    eager = _trials(target, batches)
    kernels = {"eager": target.environment()["kernels"]}
    compiling_s = seconds_of(lambda: target.compile(max_batch_tokens=settings.max_batch_tokens))
    target.refuse_slow_kernels()
    self_check = target.self_check()
    ours = _trials(target, batches)
    ceilings.append(matmul_flops_per_s(target.device, size))
    details = {
        "rows_of_batches": [rows for rows, _, _ in batches],
        "longest_of_batches": [ids_BT.shape[1] for _, _, ids_BT in batches],
        "compiling_s": compiling_s,
        "self_check": self_check,
        "kernels": {**kernels, "layertap": target.environment()["kernels"]},
    }
    return Rates(one_row=one_row, eager=eager, layertap=ours, ceilings=ceilings, details=details)


def _batches(target: Target, settings: PlanSettings) -> list[Batch]:
    """Batches of random tokens, evenly over a plan but for its two ends, which are unlike all others."""
    found = []
    for lengths in batches_of(planned(PLAN_ROWS, settings), NUM_BATCHES + 2)[1:-1]:
        shape = (len(lengths), lengths[0])
        ids_BT = torch.randint(0, target.info.vocab_size, shape, device=target.device)
        found.append((len(lengths), sum(lengths), ids_BT))
    return found


def _trials(target: Target, batches: list[Batch]) -> list[float]:
    forward_alone(target, batches)  # kernels are made for shapes that are new
    return [forward_alone(target, batches)["tokens_per_s"] for _ in range(NUM_TRIALS)]


def forward_alone(target: Target, batches: list[Batch]) -> dict[str, float]:
    """The forward pass with nothing copied or stored, over the batches once."""
    synchronize(target.device)
    start = time.perf_counter()
    for _, _, ids_BT in batches:
        target.tap(ids_BT)
    synchronize(target.device)
    elapsed_s = time.perf_counter() - start
    return {
        "tokens_per_s": sum(tokens for _, tokens, _ in batches) / elapsed_s,
        "samples_per_s": sum(rows for rows, _, _ in batches) / elapsed_s,
        "elapsed_s": elapsed_s,
    }


def batch_of(shape: tuple[int, int], target: Target) -> list[Batch]:
    """Five times a batch of full rows, which reads the clock finely enough."""
    ids_BT = torch.randint(0, target.info.vocab_size, shape, device=target.device)
    return [(shape[0], ids_BT.numel(), ids_BT)] * 5


def matmul_flops_per_s(device: torch.device, hidden_size: int) -> float:
    """The rate of a large bfloat16 matrix product of random numbers: the ceiling."""
    a = torch.randn(8192, hidden_size, device=device, dtype=torch.bfloat16)
    b = torch.randn(hidden_size, 4 * hidden_size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    synchronize(device)
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    synchronize(device)
    return 20 * 2 * a.numel() * b.shape[1] / (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
