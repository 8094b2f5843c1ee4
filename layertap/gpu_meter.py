"""How busy a lane's GPU is and how full its memory, as NVML tells; where it doesn't, why not."""

from typing import Any

import torch


class GpuMeter:
    """Utilisation and memory of one device, sampled when asked.

    NVML comes with the driver, its Python binding with the extra `cuda`. Utilisation is the share of the last
    second or less in which a kernel ran, so a mean wants many samples.
    """

    def __init__(self, device: torch.device) -> None:
        self._utilisation: list[int] = []
        self._used_bytes = self._total_bytes = 0
        self._trouble = ""
        self._nvml: Any = None
        try:
            self._open(device)
        except _NoNvmlError as error:
            self._trouble = f"no NVML: {error}"

    def _open(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise _NoNvmlError("the lane runs on the CPU")
        try:
            import pynvml
        except ImportError as error:
            raise _NoNvmlError("nvidia-ml-py isn't installed; pip install 'layertap[cuda]'") from error
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            raise _NoNvmlError(str(error)) from error
        self._nvml = pynvml

    def sample(self) -> None:
        """Look once; microseconds, without the GIL for most of it. A driver that fails is not asked again."""
        if self._nvml is None:
            return
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            self._used_bytes, self._total_bytes = max(self._used_bytes, memory.used), memory.total
            self._utilisation.append(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError as error:
            self._trouble, self._nvml = f"no NVML after {len(self._utilisation)} samples: {error}", None

    def summary(self) -> dict[str, Any]:
        """Mean utilisation in percent, largest memory used and all memory in bytes; or why there is none."""
        if not self._utilisation:
            return {"note": self._trouble or "not sampled yet"}
        return {
            "utilisation_percent": sum(self._utilisation) / len(self._utilisation),
            "num_samples": len(self._utilisation),
            "peak_memory_bytes": self._used_bytes,
            "memory_bytes": self._total_bytes,
            **({"note": self._trouble} if self._trouble else {}),
        }


class _NoNvmlError(Exception):
    """NVML can't be asked; says why."""
