"""A root to train on, made offline: SmolLM2-135M over real chats that it answers itself.

    python examples/smollm2_root.py FOLDER

It makes FOLDER/target, FOLDER/chats.jsonl (the demo's prompts with the target's own greedy answers, which are
what a drafter has to predict, then chats that another model answered), FOLDER/tokens and FOLDER/root. The
last two are made as these commands make them, but without a server:

    layertap prepare FOLDER/chats.jsonl FOLDER/tokens --tokenizer FOLDER/target --template chatml
    layertap run FOLDER/tokens --target FOLDER/target --layers 0,1,13,14,25,26 --root NAME
"""

import json
import sys
from collections.abc import Iterator
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from layertap.coordinator import Run
from layertap.lane import Lane
from layertap.lane_work import extract_in_threads
from layertap.plan import PlanSettings
from layertap.prepare import prepare_chats
from layertap.preview import RunSettings
from layertap.store import Store

sys.path.append(str(Path(__file__).parents[1] / "demo"))
from chats import NUM_EVALS, NUM_IFBENCH, evals_rows, ifbench_rows  # noqa: E402
from smollm2 import convert  # noqa: E402

LAYERS = (0, 1, 13, 14, 25, 26)
NUM_NEW_TOKENS = 96
MAX_PROMPT_TOKENS = 320
ANSWER_CHARACTERS = 800
BATCH_ROWS = 48


def prompts(tokenizer: Any, template: str) -> Iterator[dict[str, Any]]:
    """The demo's chats without their answers, as far as their prompts are short; shortest first."""
    demo = (*islice(evals_rows(), NUM_EVALS), *islice(ifbench_rows(), NUM_IFBENCH))
    chats = [{**chat, "messages": chat["messages"][:-1]} for chat in demo]
    for chat in chats:
        rendered = tokenizer.apply_chat_template(
            chat["messages"], chat_template=template, add_generation_prompt=True, return_dict=True
        )
        chat["input_ids"] = rendered["input_ids"]
    short = [chat for chat in chats if len(chat["input_ids"]) <= MAX_PROMPT_TOKENS]
    yield from sorted(short, key=lambda chat: len(chat["input_ids"]))


def answered_by_another() -> Iterator[dict[str, Any]]:
    """Chats with a larger model's answers, cut off: more to learn from, and nothing to wait for."""
    for chat in islice(ifbench_rows(), NUM_IFBENCH, None):
        user, answer = chat["messages"]
        answer["content"] = answer["content"][:ANSWER_CHARACTERS]
        yield {"id": chat["id"], "messages": [user, answer]}


@torch.inference_mode()
def write_own_answers(target: Path, out: Path) -> None:
    """Chats whose answers the target wrote, greedily and up to so many tokens; minutes on two cores."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    chats = list(prompts(tokenizer, (files("layertap") / "templates/chatml.jinja").read_text()))
    lines = []
    for start in range(0, len(chats), BATCH_ROWS):
        part = chats[start : start + BATCH_ROWS]
        padded = tokenizer.pad({"input_ids": [chat["input_ids"] for chat in part]}, return_tensors="pt")
        written = model.generate(**padded, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        answers = tokenizer.batch_decode(written[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
        for chat, answer in zip(part, answers, strict=True):
            if answer.strip():
                messages = [*chat["messages"], {"role": "assistant", "content": answer}]
                lines.append(json.dumps({"id": chat["id"], "messages": messages}))
        print(f"{len(lines)} chats answered", flush=True)
    lines += map(json.dumps, answered_by_another())
    out.write_text("\n".join(lines))


def extract(tokens: Path, target: Path, root: Path, **changes: Any) -> None:
    """One lane over the dataset, published: what `layertap run` does through Prefect."""
    settings = RunSettings(
        dataset=str(tokens),
        target=str(target),
        layer_ids=LAYERS,
        plan=PlanSettings(max_batch_tokens=2048, shard_tokens=10_000),
        **changes,
    )
    run = Run.prepare(Store.folder(root), settings)
    if run.plan is not None:
        lane = Lane.open(
            run.catalog.store, run.plan.plan_id, run="example", target=str(target), name="lane-0"
        )
        if lane is not None:
            with lane:
                extract_in_threads(lane)
    print(run.publish().markdown())


def main(folder: Path) -> None:
    """Each step, unless what it makes is there."""
    target, chats, tokens = convert(folder / "target"), folder / "chats.jsonl", folder / "tokens"
    if not chats.exists():
        write_own_answers(target, chats)
    if not tokens.exists():
        prepare_chats(
            chats,
            tokens,
            tokenizer=target,
            template="chatml",
            responses="SmolLM2-135M-Instruct, bf16, greedy; the longer ones by another model",
        )
    extract(tokens, target, folder / "root")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
