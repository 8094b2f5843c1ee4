"""The device a lane owns: which one it is, and that nobody else has it."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch

from layertap.errors import DeviceError

LOCKS = Path("/tmp")
"""Where GPUs' locks lie: the same for all users and whatever TMPDIR says, or two lanes could share a GPU."""


def host_name() -> str:
    """The name this host gives itself."""
    return socket.gethostname()


def find_device() -> torch.device:
    """The one device this process may use.

    Raises:
        DeviceError: several GPUs are visible, so that lanes might share one; or one should be and isn't.
    """
    num_gpus = torch.cuda.device_count()
    pinned_to = os.environ.get("CUDA_VISIBLE_DEVICES")
    if pinned_to and not num_gpus:
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES is {pinned_to!r}, but torch {torch.__version__} sees no GPU: "
            "check the driver and that torch is a CUDA build; set it to nothing to run on the CPU"
        )
    if num_gpus > 1:
        raise DeviceError(
            f"this lane sees {num_gpus} GPUs and must see one: start it through `layertap workers`, or set "
            f"CUDA_VISIBLE_DEVICES before Python starts (it is {pinned_to!r})"
        )
    return torch.device("cuda" if num_gpus else "cpu")


def device_name(device: torch.device) -> str:
    """`NVIDIA H200 (GPU-…)`, or `CPU (4 threads)`."""
    if device.type != "cuda":
        return f"CPU ({torch.get_num_threads()} threads)"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} (GPU-{properties.uuid})"


@contextmanager
def own_device(device: torch.device) -> Iterator[None]:
    """Hold the GPU for this process alone; the kernel lets go of it however the process ends.

    Raises:
        DeviceError: another process holds it, or its lock can't be opened.
    """
    if device.type != "cuda":
        yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    path = LOCKS / f"layertap-gpu-{uuid}.lock"
    with _opened(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DeviceError(
                f"another process holds {device_name(device)} (lock {path}): "
                "an orphan of an earlier run? End it, or start the lane on another GPU"
            ) from error
        yield


def _opened(path: Path) -> TextIO:
    """A lock file, for reading: that of another user will do, and everybody can open ours."""
    try:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL, 0o644)
            os.fchmod(descriptor, 0o644)  # whatever the umask
            os.close(descriptor)
        return path.open()
    except OSError as error:
        raise DeviceError(
            f"the lock {path} of this GPU can't be opened ({error}): it is another user's? "
            "End their lanes on this GPU and delete it"
        ) from error
