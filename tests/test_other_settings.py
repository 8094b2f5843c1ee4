"""A root is gone on with from anywhere, and never for another extraction than its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from layertap.coordinator import Run
from layertap.errors import SpecMismatchError
from layertap.store import Store
from tests.models import saved, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_llama(), tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"layer_ids": (0, 1)}, r"layer_ids: \[0, 2, 3\] here, \[0, 1\] asked"),
        ({"dtype": "bfloat16"}, "dtype: 'float32' here, 'bfloat16' asked"),
        ({"max_length": 32}, "max_length: 64 here, 32 asked"),
        ({"last_hidden_state": "post_norm"}, "last_hidden_state: 'pre_norm' here, 'post_norm' asked"),
    ],
)
def test_another_extraction_needs_another_root(
    folder_store: Store, tmp_path: Path, target: str, change: dict[str, Any], differs: str
) -> None:
    dataset = save_rows(some_rows(10), tmp_path / "rows")
    Run.prepare(folder_store, settings_for(dataset, target))
    with pytest.raises(SpecMismatchError, match=differs):
        Run.prepare(folder_store, settings_for(dataset, target, **change))


def test_another_revision_of_the_target_needs_another_root(
    folder_store: Store, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a target from the hub, whose revisions are resolved to commits."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for commit in ("0" * 40, "1" * 40):
        shutil.copytree(target, tmp_path / "models--tiny--llama" / "snapshots" / commit)
    dataset = save_rows(some_rows(10), tmp_path / "rows")
    Run.prepare(folder_store, settings_for(dataset, "tiny/llama", revision="0" * 40))
    with pytest.raises(
        SpecMismatchError, match=f"target_identity: .*@{'0' * 40}' here, .*@{'1' * 40}' asked"
    ):
        Run.prepare(folder_store, settings_for(dataset, "tiny/llama", revision="1" * 40))


def test_another_machine_with_empty_caches_computes_nothing_again(
    folder_store: Store, tmp_path: Path, target: str
) -> None:
    """What is settled is known from the store alone, wherever dataset and target lie."""
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(20), tmp_path / "rows"), target))
    assert run.plan is not None
    run_lane(folder_store, run.plan.plan_id, target)
    run.publish()
    there = tmp_path / "there"
    shutil.copytree(target, there / "target")
    shutil.move(tmp_path / "rows", there / "rows")
    code = (
        "import sys\n"
        "from layertap.coordinator import Run\n"
        "from layertap.store import Store\n"
        "from tests.runs import settings_for\n"
        "run = Run.prepare(Store.folder(sys.argv[1]), settings_for(*sys.argv[2:]))\n"
        "print(run.plan, run.publish().version.number)\n"
    )
    homes = {name: str(there) for name in ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", code, folder_store.uri, str(there / "rows"), str(there / "target")],
        env={**os.environ, **homes},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "None 1"
