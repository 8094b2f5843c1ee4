"""Pages and `layertap status` while a run of many shards goes on, and when it has ended.

    python benchmarks/large_plan.py --shards 5000 --json pages.json

Rows of eight random tokens, a shard each, go through a tiny target on this host's CPUs, with a server on
SQLite and a local folder. Half-way and at the end, a headless Chromium (Debian's) loads the pages that people
look at; what counts is the time until what they look for is to be seen.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

from benchmarks.folder_stack import STORAGE, stack_of
from benchmarks.gpu_targets import save
from benchmarks.whole_system import ROOT, Run, say, write_rows
from deployments.stack import Stack
from layertap.bench import seconds_of
from layertap.shard_state import ShardState
from layertap.watch import Watch

ROW_LENGTH = 8
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]

PATIENCE_MS = 120_000


def start_run(dataset: Path, target: Path, store: Path, lanes: int) -> Run:
    """`layertap run`, a row a shard."""
    command = [sys.executable, "-m", "layertap.cli", "run", str(dataset), "--target", str(target)]
    command += ["--layers", "1,3", "--max-length", str(ROW_LENGTH), "--root", ROOT, "--lanes", str(lanes)]
    command += ["--storage", STORAGE, "--strict", "--param", "compiled=false"]
    command += ["--param", f"shard_tokens={ROW_LENGTH}", "--param", f"max_batch_tokens={ROW_LENGTH}"]
    return Run(subprocess.Popen(command), store / ROOT)


def run_ids(stack: Stack, flow: str) -> list[str]:
    """Ids of a flow's runs, oldest first."""
    asked = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"}
    answer = httpx.post(f"{stack.api_url}/flow_runs/filter", json=asked, timeout=30)
    answer.raise_for_status()
    return [run["id"] for run in answer.json()]


def looks(page: Page, stack: Stack, root: Path, num_rows: int) -> Mapping[str, Callable[[], object]]:
    """What people look at, by name."""
    runs = f"{stack.ui_url}/v2/runs/flow-run"
    (coordinator,), lane = run_ids(stack, "extract_hidden_states"), run_ids(stack, "extraction_lane")[0]

    def artifact(key: str, text: str) -> None:
        page.goto(f"{runs}/{coordinator}")
        page.get_by_role("tab", name="Artifacts").click()
        page.get_by_text(key).first.click()
        page.get_by_text(text).first.wait_for()

    def lane_s_tasks() -> None:
        page.goto(f"{runs}/{lane}")
        page.get_by_role("tab", name="Task Runs").click()
        page.get_by_text("shard-").first.wait_for()

    def page_of_the_run() -> None:
        page.goto(f"{runs}/{coordinator}")
        page.get_by_text("Subflow Runs").first.wait_for()

    return {
        "the run's page": page_of_the_run,
        "its progress": lambda: artifact("layertap-progress", f"of {num_rows:,} rows"),
        "its shards": lambda: artifact("layertap-shards", "tokens done"),
        "a lane's page, its shards": lane_s_tasks,
        "layertap status": lambda: status(root),
        "layertap status --plan": lambda: status(root, "--plan", next((root / "plans").iterdir()).name),
    }


def status(root: Path, *more: str) -> None:
    """`layertap status`."""
    command = [sys.executable, "-m", "layertap.cli", "status", str(root), *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def look(stack: Stack, root: Path, num_rows: int) -> dict[str, float]:
    """Seconds of each look, the median of three."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        found = {
            name: median(seconds_of(what) for _ in range(3))
            for name, what in looks(page, stack, root, num_rows).items()
        }
        browser.close()
    say("seconds", **{name: round(s, 2) for name, s in found.items()})
    return found


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run, and look twice."""
    target, store = work / "target", work / "store"
    save("tiny", target, "cpu")
    write_rows(work / "rows.parquet", ROW_LENGTH * options.shards, ROW_LENGTH)
    with stack_of(work / "stack", store, options.lanes, options.port) as stack:
        begun = time.monotonic()
        run = start_run(work / "rows.parquet", target, store, options.lanes)
        run.wait(lambda: bool(run.catalog.plans()), "plan")
        (plan_id,) = run.catalog.plans()
        plan = run.catalog.plan(plan_id)

        def half_is_done() -> bool:
            counts = Watch(run.catalog, plan).poll().shards_by_state
            return 2 * counts.get(ShardState.COMMITTED, 0) >= len(plan.shards)

        run.wait(half_is_done, "half of the shards", timeout_s=3600)
        found: dict[str, Any] = {
            "shards": len(plan.shards),
            "half-way": look(stack, store / ROOT, options.shards),
        }
        found["was running"] = run.process.poll() is None
        if run.process.wait(3600):
            raise SystemExit("the run failed")
        found["run_s"] = time.monotonic() - begun
        found["at the end"] = look(stack, store / ROOT, options.shards)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=5000)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--port", type=int, default=4291)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="large-plan-") as work:
        found = measure(options, Path(work))
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
