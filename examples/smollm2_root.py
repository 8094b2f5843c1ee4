"""A root to train on, made offline: SmolLM2-135M over real chats that it answers itself.

    python examples/smollm2_root.py FOLDER                      minutes on two cores
    python examples/smollm2_root.py FOLDER --per-subject 12     ten times as many chats, for a GPU

It makes FOLDER/target, FOLDER/prompts.jsonl (the demo's chats without their answers, and chats that another
model answered), FOLDER/chats.jsonl (with the target's own greedy answers, which are what a drafter has to
predict), FOLDER/tokens and FOLDER/root; what is there is left alone. The last two are made as these commands
make them, but without a server:

    layertap prepare FOLDER/chats.jsonl FOLDER/tokens --tokenizer FOLDER/target --template chatml
    layertap run FOLDER/tokens --target FOLDER/target --layers 0,1,13,14,25,26 --root NAME
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.resources import files
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from train_drafter import HELD_OUT

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

Chat = dict[str, Any]

LAYERS = (0, 1, 13, 14, 25, 26)
NUM_NEW_TOKENS = 96
MAX_PROMPT_TOKENS = 320
ANSWER_CHARACTERS = 800
BATCH_ROWS = {"cpu": 48, "cuda": 512}


def prompts(per_subject: int) -> Iterator[Chat]:
    """The demo's chats without their answers, with up to so many of a subject; all of them are different."""
    evals = evals_rows(per_subject) if per_subject > 1 else islice(evals_rows(), NUM_EVALS)
    seen = set[str]()
    for chat in (*evals, *islice(ifbench_rows(), NUM_IFBENCH)):
        messages = chat["messages"][:-1]
        if messages and messages[-1]["role"] != "assistant" and json.dumps(messages) not in seen:
            seen.add(json.dumps(messages))
            yield {"id": chat["id"], "messages": messages}


def answered_by_another() -> Iterator[Chat]:
    """Chats with a larger model's answers, cut off: more to learn from, and nothing to wait for."""
    for chat in islice(ifbench_rows(), NUM_IFBENCH, None):
        user, answer = chat["messages"]
        answer["content"] = answer["content"][:ANSWER_CHARACTERS]
        yield {"id": chat["id"], "messages": [user, answer]}


@torch.inference_mode()
def own_answers(chats: Iterable[Chat], target: Path, device: str) -> Iterator[Chat]:
    """Chats with the answers that the target writes, greedily and up to so many tokens; long ones are not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval().to(device)
    render = partial(tokenizer.apply_chat_template, return_dict=True)
    template = (files("layertap") / "templates/chatml.jinja").read_text()
    rendered = [
        (render(chat["messages"], chat_template=template, add_generation_prompt=True)["input_ids"], chat)
        for chat in chats
    ]
    short = [(ids, chat) for ids, chat in rendered if len(ids) <= MAX_PROMPT_TOKENS]
    short.sort(key=lambda pair: len(pair[0]))
    rows = BATCH_ROWS[device.partition(":")[0]]
    for start in range(0, len(short), rows):
        part = short[start : start + rows]
        padded = tokenizer.pad({"input_ids": [ids for ids, _ in part]}, return_tensors="pt").to(device)
        written = model.generate(**padded, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        answers = tokenizer.batch_decode(written[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
        for (_, chat), answer in zip(part, answers, strict=True):
            if answer.strip():
                yield {**chat, "messages": [*chat["messages"], {"role": "assistant", "content": answer}]}
        print(f"{start + len(part)} chats answered", flush=True)


def subject(chat: Chat) -> str:
    """What chats that are alike have in common: the name before the number, or the whole id of a lone one."""
    name, _, _ = chat["id"].rpartition(":")
    return name if name != "ifbench" else chat["id"]


def dealt(own: Iterable[Chat], others: Iterable[Chat]) -> Iterator[Chat]:
    """Every sixth chat, which the trainer holds out, is of a subject of which no other chat is."""
    groups = [list(group) for _, group in groupby(sorted(own, key=subject), key=subject)]
    random.Random(0).shuffle(groups)
    rest, held_out = list(others), list[Chat]()
    wanted = (len(rest) + sum(map(len, groups))) / HELD_OUT
    for group in groups:
        (held_out if len(held_out) < wanted else rest).extend(group)
    random.Random(0).shuffle(rest)
    for k, chat in enumerate(held_out[: len(rest) // (HELD_OUT - 1) + 1]):
        yield chat
        yield from rest[k * (HELD_OUT - 1) :][: HELD_OUT - 1]


def write(chats: Iterable[Chat], out: Path) -> None:
    """One JSON object a line, all of them or no file."""
    part = out.with_suffix(".part")
    part.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    part.rename(out)


def write_chats(path: Path, target: Path, out: Path, device: str) -> None:
    """The prompts with the target's answers, and the chats that have one already, as they are dealt."""
    chats = [json.loads(line) for line in path.read_text().splitlines()]
    to_answer = [chat for chat in chats if chat["messages"][-1]["role"] != "assistant"]
    answered = [chat for chat in chats if chat["messages"][-1]["role"] == "assistant"]
    write(dealt(own_answers(to_answer, target, device), answered), out)


def extract(tokens: Path, target: Path, root: Path, **changes: Any) -> None:
    """One lane over the dataset, published: what `layertap run` does through Prefect."""
    settings = RunSettings(
        dataset=str(tokens),
        target=str(target),
        layer_ids=LAYERS,
        plan=PlanSettings(max_batch_tokens=4096, shard_tokens=100_000),
        **changes,
    )
    run = Run.prepare(Store.folder(root), settings)
    if run.plan is not None:
        lane = Lane.open(
            run.catalog.store,
            run.plan.plan_id,
            run="example",
            target=str(target),
            name="lane-0",
            compiled=False,  # takes longer than it saves here
        )
        if lane is not None:
            with lane:
                extract_in_threads(lane)
    version = run.publish().version
    print(f"{version.num_stored} of {version.num_rows} rows, {version.num_tokens:,} tokens, in {root}")


def main() -> None:
    """Each step, unless what it makes is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-subject", type=int, default=1, help="prompts of each of 465 subjects")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="to answer on"
    )
    options = parser.parse_args()
    folder: Path = options.folder
    target, chats, tokens = convert(folder / "target"), folder / "chats.jsonl", folder / "tokens"
    if not (folder / "prompts.jsonl").exists():
        write((*prompts(options.per_subject), *answered_by_another()), folder / "prompts.jsonl")
    if not chats.exists():
        write_chats(folder / "prompts.jsonl", target, chats, options.device)
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
    main()
