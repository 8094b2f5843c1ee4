"""Whether a host has what a lane needs, found out before the target is loaded.

What a lane takes at its peak is reckoned roughly, in bytes:

    weights      parameters of the whole target * bytes of a state; not counted for quantised checkpoints
    slots        their number (`TargetInfo.num_slots`) times the plan's largest batch file
    activations  tokens of the largest batch * bytes of a state
                 * ((2 * stored states + 8) * hidden size + 3 * widest matrix of a layer)

On a GPU all three lie in its memory, and the host holds the slots once more, beside torch and CUDA. On a CPU
all of it is the host's.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import nn

from layertap.catalog import ROOT, PlanRecord, Root
from layertap.errors import DeviceError, HostError
from layertap.findings import Findings
from layertap.gpu_caches import use_caches
from layertap.host import device_name, find_device, host_name, own_device
from layertap.host_memory import available_memory
from layertap.kernels import keep_gpu_kernels_out
from layertap.records import parsed
from layertap.staging import slot_nbytes
from layertap.target_info import Source, TargetInfo, find_backbone, load_config, meta_model

PROCESS_BYTES = 3 << 30
"""Host memory of a process on a GPU beside its slots: torch, CUDA, compiled code, the rows of two shards."""

SCRATCH_BYTES = 2 << 30
"""Disk for compiled and tuned kernels; a target of 64 layers leaves a few hundred megabytes."""

WAY_OUT = "give a smaller max_batch_tokens, run fewer lanes there, or take a larger one"

MOVE = "Make room, or name another folder in XDG_CACHE_HOME"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a lane takes at its peak, in bytes."""

    weights: int
    num_slots: int
    slots: int
    pinned: int
    """What the slots take of the host where there is a GPU: torch pins memory by powers of two."""

    activations: int

    @classmethod
    def of(cls, plan: PlanRecord, root: Root, model: nn.Module) -> Self:
        """Reckon it for a plan and a model that needs no memory itself.

        Raises:
            IntegrityError: the root's record lacks a field of its target.
        """
        spec, target = root.spec, parsed(ROOT, root.target, TargetInfo.from_dict)
        num_tokens = max(
            plan.settings.max_batch_tokens, plan.max_batch_bytes // spec.bytes_per_token(target.hidden_size)
        )
        widest = max(max(p.shape) for p in find_backbone(model).layers.parameters() if p.dim() == 2)
        of_token = (2 * spec.num_states + 8) * target.hidden_size + 3 * widest
        is_quantized = target.quantization is not None
        slot_bytes = slot_nbytes(plan.max_batch_bytes, spec=spec, hidden_size=target.hidden_size)
        num_slots = target.num_slots(spec, plan.max_batch_bytes)
        return cls(
            num_slots=num_slots,
            weights=0 if is_quantized else sum(p.numel() for p in model.parameters()) * spec.item_bytes,
            slots=num_slots * slot_bytes,
            pinned=num_slots << (slot_bytes - 1).bit_length(),
            activations=num_tokens * spec.item_bytes * of_token,
        )

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.slots + self.activations

    def __str__(self) -> str:
        parts = {"weights": self.weights, f"{self.num_slots} slots": self.slots, "a batch": self.activations}
        return ", ".join(f"{name} {num_bytes / 1e9:.1f}" for name, num_bytes in parts.items())


@contextmanager
def checked_device(
    plan: PlanRecord, root: Root, *, source: str, revision: str | None, compiled: bool
) -> Iterator[torch.device]:
    """The one device of this process, held for it alone, on a host that has what a lane of the plan needs.

    Args:
        plan: what the lane will work through.
        root: of the extraction.
        source: the target on this host.
        revision: hub revision of the target.
        compiled: whether kernels will be compiled and kept.

    Raises:
        DeviceError: none or several are visible, another process has it, or its memory is too small.
        HostError: memory or disk of the host is too small.
        IntegrityError: the root's record lacks a field of its target.
        TargetError: there is no such target here.
        NotReadyError: several of these; all are in its message.
    """
    found = Findings(f"host {host_name()} can't run a lane of plan {plan.plan_id}")
    with ExitStack() as exits:
        device = None
        with found.noted():
            device = find_device()
            exits.enter_context(own_device(device))
        with found.noted():
            needs = _needs(plan, root, source, revision)
            with found.noted():
                _check_host(needs, device)
            if device is not None and device.type == "cuda":
                _check_gpu(needs, device)
        if compiled and "TORCHINDUCTOR_CACHE_DIR" in os.environ:
            with found.noted():
                _check_scratch(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        found.check()
        assert device is not None
        yield device


def _needs(plan: PlanRecord, root: Root, source: str, revision: str | None) -> Needs:
    if torch.cuda.is_available():
        use_caches(torch.device("cuda"))
    else:
        keep_gpu_kernels_out()
    path = str(Path(source).expanduser()) if Path(source).expanduser().is_dir() else source
    found = Source(path=path, revision=revision, identity=root.spec.target_identity)
    return Needs.of(plan, root, meta_model(load_config(found), source))


def _check_host(needs: Needs, device: torch.device | None) -> None:
    is_cpu = device is not None and device.type == "cpu"
    needed = needs.total if is_cpu else needs.pinned + PROCESS_BYTES
    told = (
        needs if is_cpu else f"{needs.num_slots} slots {needs.pinned / 1e9:.1f}, the process itself the rest"
    )
    available = available_memory()
    if available < needed:
        raise HostError(
            f"{available / 1e9:.1f} GB of memory are left to this process, and a lane takes about "
            f"{needed / 1e9:.1f} GB ({told}): {WAY_OUT}"
        )


def _check_gpu(needs: Needs, device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    if free < needs.total:
        raise DeviceError(
            f"{device_name(device)} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free, and a lane takes "
            f"about {needs.total / 1e9:.1f} GB ({needs}): {WAY_OUT}"
        )


def _check_scratch(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise HostError(f"compiled kernels can't be kept in {folder}: {error}. {MOVE}") from error
    if free < SCRATCH_BYTES:
        raise HostError(
            f"compiled kernels need up to {SCRATCH_BYTES / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB "
            f"are free. {MOVE}"
        )
