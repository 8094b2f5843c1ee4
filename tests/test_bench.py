"""Benchmarks compare like with like, in turns, and say by their goals what was met."""

import ctypes
import hashlib
import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load

from layertap import HiddenStates
from layertap.bench import Measured, command, in_turns, median_ratio, planning, reads
from layertap.bench.distance import away
from layertap.bench.engine import batches_of, plain_write_s
from layertap.bench.null_target import NullTarget, planned, rows_of
from layertap.bench.probes import GilTicker, MemoryPeak
from layertap.bench.writes import write_in_line
from layertap.cli import main
from layertap.extract import Extractor
from layertap.plan import PlanSettings
from layertap.progress import Clock
from layertap.store import Store


def ratio(**goal: float) -> Measured:
    return Measured(name="", layertap=1, against=1, unit="s", against_what="", ratio=2.0, **goal)


@pytest.mark.parametrize(
    ("goal", "text", "is_met"),
    [
        ({"at_least": 3.2}, "≥ 3.2", False),
        ({"at_least": 2.0}, "≥ 2", True),
        ({"at_most": 1.5}, "≤ 1.5", False),
        ({"at_most": 2.0}, "≤ 2", True),
        ({}, "", None),
    ],
)
def test_goals(goal: dict[str, float], text: str, is_met: bool | None) -> None:
    assert (ratio(**goal).goal, ratio(**goal).is_met) == (text, is_met)


def test_what_is_compared_is_measured_in_turns() -> None:
    seen: list[str] = []

    def work(name: str) -> float:
        seen.append(name)
        return float(len(seen))

    ours, theirs = in_turns(3, partial(work, "ours"), partial(work, "theirs"))
    assert seen == ["ours", "theirs"] * 3
    assert (ours, theirs) == ([1, 3, 5], [2, 4, 6])
    assert median_ratio(ours, theirs) == pytest.approx(3 / 4)


def test_a_far_server_answers_late_and_unchanged() -> None:
    body = bytes(range(256)) * 5000

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(hashlib.sha256(data).digest())

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with away(server.server_port, 0.3) as port:
        start = time.monotonic()
        with urlopen(f"http://127.0.0.1:{port}/", body) as answer:
            assert answer.read() == hashlib.sha256(body).digest()
        assert time.monotonic() - start >= 0.3
    server.shutdown()
    server.server_close()


def test_the_usual_way_and_layertap_store_the_same_states(tmp_path: Path) -> None:
    lengths, target = [3, 3], NullTarget.made(6)
    rows = rows_of([lengths] * 2)
    usual: dict[str, bytes] = {}
    write_in_line(target, rows, usual.__setitem__, "usual")
    store = Store.folder(tmp_path)
    with Extractor(target, store, max_batch_bytes=6 * 61_444, num_slots=2, clock=Clock()) as extractor:
        result = extractor.extract_shard(rows, "ours", on_progress=lambda *_: None, should_stop=lambda: None)
    ours = {name: t for f in result.files for name, t in load(store.get(f"ours/{f['name']}")).items()}
    assert len(usual) == len(rows.keys) == 4 and len(ours) == 12
    for path, data in usual.items():
        key = rows.keys[int(Path(path).stem)].tobytes().hex()
        for name, tensor in load(data).items():
            assert torch.equal(tensor, ours[f"{key}/{name}"])


def test_a_slice_of_a_plan_reaches_from_its_longest_to_its_shortest_rows() -> None:
    plan = planned(2_000, PlanSettings(max_batch_tokens=8192, shard_tokens=100_000))
    batches = batches_of(plan, 6)
    longest = [batch[0] for batch in batches]
    assert longest == sorted(longest, reverse=True)
    assert longest[0] == plan.num_tokens.max() and min(batches[-1]) == plan.num_tokens.min()
    assert all(len(batch) * batch[0] <= 8192 for batch in batches)


def test_a_plain_write_leaves_nothing(tmp_path: Path) -> None:
    assert plain_write_s(tmp_path / "plain", 1_000_001) > 0
    assert not list(tmp_path.iterdir())


def test_who_holds_the_gil_is_seen() -> None:
    with GilTicker() as ticker:
        time.sleep(0.05)
        ctypes.PyDLL(None).usleep(200_000)  # a call that keeps the GIL
    assert ticker.figures()["longest_ms"] > 150


def test_the_peak_of_memory_is_seen_after_it_is_freed() -> None:
    with MemoryPeak() as memory:
        before = memory.peak_bytes
        np.ones(200_000_000, np.uint8).sum()
    assert memory.peak_bytes > before + 150_000_000


def test_the_command_writes_a_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "NUM_ROWS", 300)
    out = tmp_path / "bench.json"
    shown = CliRunner().invoke(main, ["bench", "planning", "--folder", str(tmp_path), "--json", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "planning" in shown.output and "layertap" in shown.output
    report: dict[str, Any] = json.loads(out.read_text())
    (found,) = report["measured"]
    assert found["name"] == "planning 300 rows" and found["details"]["rows"] == 300 and found["ratio"] > 0
    assert report["before"]["num_cores"] and report["not_run"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_forward_pass_is_measured_where_there_is_a_gpu_and_said_to_be_left_out_elsewhere(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = {name: lambda _: [ratio()] for name in command.BENCHMARKS}
    monkeypatch.setattr(command, "BENCHMARKS", benchmarks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    out = tmp_path / "bench.json"
    shown = CliRunner().invoke(main, ["bench", "--json", str(out)]).output
    report = json.loads(out.read_text())
    assert ("not run, it needs a GPU" in shown) is bool(report["not_run"]) is not has_gpu
    assert len(report["measured"]) == len(benchmarks) - (not has_gpu)


def test_without_a_gpu_the_forward_pass_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = CliRunner().invoke(main, ["bench", "forward", "--json", str(tmp_path / "bench.json")])
    assert shown.exit_code == 2 and "it needs a GPU" in shown.output
    assert not list(tmp_path.iterdir())


def test_all_ways_of_reading_give_the_rows_of_the_root(tmp_path: Path) -> None:
    store = Store.folder(tmp_path / "root")
    reads.write_root(store, tmp_path, gib=0.02)
    states = HiddenStates(store)
    reads.write_samples(store, states)
    row_bytes, file_bytes = int(states.places.nbytes.sum()), reads.raw_files(states)
    assert reads.stream_rows(states) == reads.stream_packed(states) == row_bytes
    assert reads.raw_into_memory(states) == file_bytes
    assert row_bytes < file_bytes == sum(store.head(path).size for path in reads.batch_files(states))
    for way in (reads.random_rows, reads.random_samples, reads.random_raw):
        assert way(states) == len(states)
