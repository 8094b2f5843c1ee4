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
"""Samples a record holds; beyond them every other one goes."""


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
        if self._num_notes % self._every == 0:
            rss = self._process.memory_info().rss
            self._samples.append([sum(seconds.values()), num_tokens, rss])
        self._num_notes += 1
        if len(self._samples) > MAX_SAMPLES:
            self._samples, self._every = self._samples[::2], 2 * self._every
        record = LaneRecord(
            **self._who,
            updated_at=now("milliseconds"),
            seconds=seconds,
            num_tokens=num_tokens,
            samples=list(self._samples),
            gpu=self._meter.summary(),
        )
        self._store.put(self._path, to_json(asdict(record)))
        return record
