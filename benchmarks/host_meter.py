"""How busy the host and its GPUs are, sampled in the background."""

import importlib.util
import time
from typing import Any

import psutil

from layertap.bench.probes import Sampler

PERIOD_S = 0.25


class HostMeter(Sampler):
    """Load of the host's cores, its memory in use, each GPU's load as NVML tells."""

    def __init__(self) -> None:
        super().__init__()
        self._samples: list[tuple[float, float, int, list[int]]] = []
        self._gpus: list[tuple[str, Any]] = []
        self._nvml: Any = None
        if importlib.util.find_spec("pynvml"):
            self._open_gpus()

    def _open_gpus(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._nvml = pynvml
        handles = [pynvml.nvmlDeviceGetHandleByIndex(k) for k in range(pynvml.nvmlDeviceGetCount())]
        self._gpus = [(str(pynvml.nvmlDeviceGetUUID(handle)), handle) for handle in handles]

    def _watch(self) -> None:
        psutil.cpu_percent()
        while not self._ended.wait(PERIOD_S):
            gpus = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu for _, handle in self._gpus]
            self._samples.append((time.time(), psutil.cpu_percent(), psutil.virtual_memory().used, gpus))

    def between(self, start: float, end: float) -> dict[str, Any]:
        """Means over a window of time of day; of memory the largest. A GPU is idle while no kernel runs."""
        samples = [sample for sample in self._samples if start <= sample[0] <= end]
        if not samples:
            return {}
        num_cores = psutil.cpu_count() or 1
        return {
            "host_cores_busy": sum(sample[1] for sample in samples) / len(samples) / 100 * num_cores,
            "host_cores": num_cores,
            "host_memory_peak_gb": max(sample[2] for sample in samples) / 1e9,
            "gpu_idle_share": {
                uuid: 1 - sum(sample[3][k] for sample in samples) / len(samples) / 100
                for k, (uuid, _) in enumerate(self._gpus)
            },
        }
