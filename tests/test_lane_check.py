"""A host is told all that it lacks before a target is loaded."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from layertap import lane_check
from layertap.catalog import PlanRecord, Root
from layertap.coordinator import Run
from layertap.errors import DeviceError, HostError, IntegrityError, NotReadyError, TargetError
from layertap.host_memory import available_memory
from layertap.lane_check import Needs, checked_device
from layertap.staging import MAX_SLOTS, slot_nbytes
from layertap.store import Store
from tests.models import saved, tiny_llama
from tests.runs import save_rows, settings_for, some_rows

GIB = 1 << 30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_llama(), tmp_path_factory.mktemp("target"))


@pytest.fixture
def needy(folder_store: Store, tmp_path: Path, target: str) -> tuple[PlanRecord, Root, Any]:
    """What a lane's needs come from: a plan of 20 rows, its root and the target."""
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(20), tmp_path / "rows"), target))
    assert run.plan is not None
    return run.plan, run.catalog.root(), tiny_llama()


@pytest.fixture
def check(needy: tuple[PlanRecord, Root, Any], target: str) -> Callable[..., torch.device]:
    """What a lane does first; returns its device."""
    plan, root, _ = needy

    def checked(source: str = target) -> torch.device:
        with checked_device(plan, root, source=source, revision=None, compiled=True) as device:
            return device

    return checked


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A GPU with as much free memory as it says."""
    fake = SimpleNamespace(uuid="test", name="Fake", free=80 * GIB)
    monkeypatch.setattr("layertap.host.LOCKS", tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: fake)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (fake.free, 80 * GIB))
    return fake


def test_what_a_lane_takes_grows_with_weights_slots_and_the_largest_batch(
    needy: tuple[PlanRecord, Root, Any],
) -> None:
    plan, root, model = needy
    needs = Needs.of(plan, root, model)
    assert needs.weights == sum(p.numel() * p.element_size() for p in model.parameters())
    assert needs.num_slots == MAX_SLOTS  # so small a target fills them all in no time
    assert needs.slots == needs.num_slots * slot_nbytes(plan.max_batch_bytes, spec=root.spec, hidden_size=64)
    each = needs.pinned // needs.num_slots
    assert each.bit_count() == 1 and each // 2 < needs.slots // needs.num_slots <= each
    # 256 tokens in float32; four states twice and eight of 64, three times the widest matrix's 128
    assert needs.activations == 256 * 4 * ((2 * 4 + 8) * 64 + 3 * 128)
    assert needs.total == needs.weights + needs.slots + needs.activations
    quantized = dataclasses.replace(root, target={**root.target, "quantization": {"bits": 4}})
    assert Needs.of(plan, quantized, model).weights == 0


def test_a_target_of_another_minor_format_is_reckoned_with_alike(
    needy: tuple[PlanRecord, Root, Any],
) -> None:
    plan, root, model = needy
    told = {name: value for name, value in root.target.items() if value is not None} | {"added": 1}
    assert Needs.of(plan, dataclasses.replace(root, target=told), model) == Needs.of(plan, root, model)
    del told["num_parameters"]
    with pytest.raises(IntegrityError, match=r"layertap.json is damaged: it lacks .* 'num_parameters'"):
        Needs.of(plan, dataclasses.replace(root, target=told), model)


def test_a_host_with_enough_of_all_gives_its_device(check: Callable[..., torch.device]) -> None:
    assert check() == torch.device("cpu")


def test_a_gpu_with_enough_of_all_is_given(check: Callable[..., torch.device], gpu: Any) -> None:
    assert check() == torch.device("cuda")


def test_too_little_memory_on_a_cpu_host_is_told_with_numbers(
    check: Callable[..., torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_check, "available_memory", lambda: 100_000)
    with pytest.raises(HostError, match="0.0 GB of memory are left .*about .*weights.*slots.*a batch"):
        check()


def test_a_gpu_too_small_for_the_plan_is_told_with_numbers(
    check: Callable[..., torch.device], gpu: Any
) -> None:
    gpu.free = 1000
    with pytest.raises(DeviceError, match=r"Fake .GPU-test. has 0.0 of 85.9 GB free.*smaller max_batch"):
        check()


def test_all_that_a_host_lacks_is_told_in_one_message(
    check: Callable[..., torch.device], gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu.free = 1000
    monkeypatch.setattr(lane_check, "available_memory", lambda: GIB)
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(NotReadyError, match="can't run a lane of plan .*: 3 findings") as raised:
        check()
    assert [type(one) for one in raised.value.findings] == [HostError, DeviceError, HostError]
    for part in (
        "1.1 GB of memory are left",
        "has 0.0 of 85.9 GB free",
        "compiled kernels need up to 2.1 GB",
    ):
        assert part in str(raised.value)


def test_two_gpus_a_target_that_is_not_there_and_a_folder_that_is_none(
    check: Callable[..., torch.device], gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (tmp_path / "kernels").touch()
    with pytest.raises(NotReadyError) as raised:
        check(str(tmp_path / "no target"))
    assert [type(one) for one in raised.value.findings] == [DeviceError, TargetError, HostError]


GROUPS = {
    "v2": (
        "0::/slice/service\n",
        {
            "slice/service/memory.max": "max",
            "slice/memory.max": str(3 * GIB),
            "slice/memory.current": str(2 * GIB),
            "slice/memory.stat": f"anon 5\ninactive_file {GIB // 2}",
        },
    ),
    "v1": (
        "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",  # a container: its group is the mount itself
        {
            "memory/memory.limit_in_bytes": str(3 * GIB),
            "memory/memory.usage_in_bytes": str(2 * GIB),
            "memory/memory.stat": f"cache 7\ntotal_inactive_file {GIB // 2}",
        },
    ),
}


@pytest.mark.parametrize("version", GROUPS)
def test_a_control_group_bounds_what_is_left(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, files = GROUPS[version]
    (tmp_path / "own").write_text(lines)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{text}\n")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9 * GIB))
    assert available_memory(tmp_path / "own", tmp_path / "groups") == 3 * GIB // 2
    assert available_memory(tmp_path / "none", tmp_path / "groups") == 9 * GIB
