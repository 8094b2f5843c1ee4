"""A lane's record, sampled and kept in the store while the lane works."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import psutil
import torch

from layertap.gpu_meter import GpuMeter
from layertap.host import device_name, host_name
from layertap.lane_record import LaneRecord, lane_path
from layertap.progress import Clock
from layertap.records import now, to_json
from layertap.store import Store

MAX_SAMPLES = 400
"""Samples a record holds, an even number; then every other one goes, but for its peak of memory."""


class LaneLog:
    """Keeps a lane's record in the store. One thread at a time may note.

    `opened_at` is when `clock` began: samples count from there. `environment` is the target's.
    """

    def __init__(
        self,
        store: Store,
        plan_id: str,
        *,
        lane: str,
        run: str,
        device: torch.device,
        environment: Mapping[str, Any],
        opened_at: str,
        clock: Clock,
    ) -> None:
        self._store, self._path = store, lane_path(plan_id, lane)
        self._clock = clock
        self._meter = GpuMeter(device)
        self._process = psutil.Process()
        self._samples: list[list[float]] = []
        self._every = 1
        self._num_notes = 0
        self._peak_bytes = 0
        self._who: dict[str, Any] = {
            "lane": lane,
            "run": run,
            "host": host_name(),
            "device": device_name(device),
            "environment": dict(environment),
            "opened_at": opened_at,
        }

    def note(self, num_tokens: int) -> LaneRecord:
        """Sample the device and this process, and write the record.

        Raises:
            StoreError: it can't be written.
        """
        self._meter.sample()
        seconds = self._clock.seconds
        self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)
        told = [*self._samples, [sum(seconds.values()), num_tokens, self._peak_bytes]]
        if self._num_notes % self._every == 0:
            self._samples, self._peak_bytes = told, 0
        self._num_notes += 1
        if len(self._samples) == MAX_SAMPLES:
            self._thin()
        record = LaneRecord(
            **self._who,
            updated_at=now("milliseconds"),
            seconds=seconds,
            num_tokens=num_tokens,
            samples=told,
            gpu=self._meter.summary(),
        )
        self._store.put(self._path, to_json(asdict(record)))
        return record

    def _thin(self) -> None:
        kept, gone = self._samples[::2], self._samples[1::2]
        for sample, before in zip(kept[1:], gone, strict=False):
            sample[2] = max(sample[2], before[2])
        self._samples, self._every, self._peak_bytes = kept, 2 * self._every, int(gone[-1][2])
