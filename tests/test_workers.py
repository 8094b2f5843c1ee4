"""Workers: one a visible GPU, pinned by UUID; unpinned ones where there is none."""

import os
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from deployments import workers
from deployments.workers import Worker, control_workers, lane_workers
from layertap.errors import DeviceError
from tests.fake_prefect import answering

GPUS = {"0": "GPU-aaaa-1", "1": "GPU-bbbb-2", "2": "GPU-bbcc-3"}


@pytest.fixture
def three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose nvidia-smi lists three GPUs."""
    listed = "".join(f"{index}, {uuid}\n" for index, uuid in GPUS.items())
    _install_nvidia_smi(tmp_path, f"cat <<'E'\n{listed}E\n", monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def _install_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def pins(num_lanes: int | None = None) -> list[str]:
    return [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in lane_workers(num_lanes)]


@pytest.mark.usefixtures("three_gpus")
def test_each_gpu_gets_a_worker_that_sees_it_alone_and_takes_one_run() -> None:
    assert pins() == list(GPUS.values())
    assert {worker.limit for worker in lane_workers()} == {1}
    assert len({worker.name for worker in lane_workers()}) == len(GPUS)


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ("2,0", ["GPU-bbcc-3", "GPU-aaaa-1"]),
        ("GPU-bbbb-2", ["GPU-bbbb-2"]),
        ("GPU-aa", ["GPU-aaaa-1"]),
    ],
)
def test_cuda_visible_devices_leaves_some(
    visible: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert pins() == chosen


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("visible", ["3", "GPU-bb", "GPU-cccc"])
def test_a_gpu_that_is_not_there_is_named(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceError, match=f"'{visible}'; this host has 0 \\(GPU-aaaa-1\\)"):
        lane_workers()


@pytest.mark.usefixtures("three_gpus")
def test_fewer_lanes_than_gpus_are_fine_and_more_are_refused() -> None:
    assert pins(2) == ["GPU-aaaa-1", "GPU-bbbb-2"]
    with pytest.raises(DeviceError, match="4 lanes asked for, but this host shows 3 GPUs"):
        lane_workers(4)


def test_a_failing_driver_is_no_host_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, "echo driver/library version mismatch; exit 18\n", monkeypatch)
    with pytest.raises(DeviceError, match="version mismatch"):
        lane_workers()


@pytest.mark.usefixtures("no_gpu")
def test_without_gpus_the_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert [worker.environment for worker in lane_workers(3)] == [{"OMP_NUM_THREADS": "2"}] * 3
    assert [worker.environment for worker in lane_workers()] == [{"OMP_NUM_THREADS": "8"}]


def test_coordinators_share_a_worker_in_their_own_pool() -> None:
    (worker,) = control_workers()
    assert worker.pool == "layertap-control"
    assert worker.limit > 1


class Idler(Worker):
    """A worker whose engine does nothing, until it is told to end."""

    def _start(self) -> None:
        environment = {**os.environ, "PREFECT__FLOW_RUN_ID": str(uuid4())}
        command = ["sh", "-c", "sleep 60 & wait"]
        self.process = psutil.Popen(command, env=environment, start_new_session=True)
        while not self.engines():
            time.sleep(0.01)


@pytest.mark.parametrize("status", [401, 404, 503])
def test_workers_end_and_are_replaced_though_the_server_refuses_what_is_reported(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "RESTART_S", 0.0)
    with answering(status) as server:
        url = f"http://127.0.0.1:{server.server_port}/api"
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
            worker = Idler(control_workers()[0])
            worker.look()
            engines, first = worker.engines(), worker.process
            first.kill()
            first.wait()
            worker.look()
            engines += worker.engines()
            workers.stop([worker])
    assert worker.process is not first and worker.process.poll() is not None
    assert not any(map(workers._alive, engines))
    assert capsys.readouterr().out.count("the server wasn't told that flow run") == 2
