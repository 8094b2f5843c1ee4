"""What a GPU host keeps of compiling and tuning, so that the next lane starts without.

What torch compiled and what Triton tuned lie in one folder for each combination of versions and GPU, which
the lanes of all runs share.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "transformers", "fla-core", "layertap")

FLA_CONFIGS = Path(__file__).parent / "fla_configs"
"""Kernels of fla that aren't tuned: the sum of decays would be, anew for each number of rows in a batch."""


def cache_folder(device: torch.device) -> Path:
    """Where compiled and tuned kernels of these versions lie for this GPU, below `$XDG_CACHE_HOME`."""
    gpu = torch.cuda.get_device_name(device)
    versions = "\n".join(f"{name} {_version(name)}" for name in PACKAGES)
    key = hashlib.blake2b(f"{versions}\n{gpu}".encode(), digest_size=8).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "layertap" / "kernels" / key


def use_caches(device: torch.device) -> None:
    """Have torch, Triton and fla keep their results there, unless the environment says where.

    Call it before the target's code is imported: fla reads its settings then.
    """
    folder = cache_folder(device)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    if "FLA_CONFIG_DIR" not in os.environ:
        os.environ.setdefault("FLA_CACHE_MODE", "full")
        os.environ["FLA_CONFIG_DIR"] = str(FLA_CONFIGS)


@contextmanager
def one_compiles(device: torch.device) -> Iterator[None]:
    """Let one process of this host compile first; those that wait go on together, with what it left.

    On a CPU, for which nothing is kept, nobody waits.
    """
    if device.type != "cuda":
        yield
        return
    folder = cache_folder(device)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
