"""Trains a small drafter on what layertap stored.

    layertap run tokens/ --target TARGET --layers 1,14,26 --root NAME
    layertap vocab-map ROOT --draft-vocab 3072 --out map.pt
    python examples/train_drafter.py ROOT map.pt

The drafter is an EAGLE head: one decoder layer over three layers of the target. From the target's states at
a token, and the token after it, it predicts the target's probabilities of the token after that, which norm
and head make of the stored last state, and the target's states at the next token, from which it drafts on.
`compare_drafters.py` trains it on wrong states.

Shapes: B rows, T tokens, L layers, H hidden size.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, RandomSampler

from layertap import HiddenStates
from layertap.target_files import TargetFiles

HELD_OUT = 6  # every so many-th row is for measuring only, if the target answered it
WINDOW = 128  # tokens of a row that are read together: the states know what was before
FIRST_LOGITS = 0.2  # of what a norm like the target's gives them: training begins near even guesses
IGNORED = -1  # in place of a token: nothing is learnt there

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a drafter is made and trained."""

    steps: int = 400
    rows: int = 6
    drafted: int = 4
    learning_rate: float = 2.5e-3
    seed: int = 0
    workers: int = 1
    bf16: bool = False  # whether products are rounded in training, which halves its time; weights never are


@dataclass(kw_only=True)
class Report:
    """How a training went."""

    losses: list[float]
    elapsed_s: float
    wait_share: float  # of that time, spent waiting for the next batch


class Rows(Dataset[Batch]):
    """Some rows of a root, window by window or only their ends, as the drafter sees them.

    A window is `input_ids` [T], `loss_mask` [T], `features` [T, L, H] and `last` [T, H], before the norm.
    """

    def __init__(self, stored: HiddenStates, numbers: Sequence[int], *, ends_only: bool = False) -> None:
        self.stored = stored
        self.windows = [
            (i, slice(max(0, end - WINDOW), end))
            for i in numbers
            for end in range(int(stored.num_tokens[i]), 0, -WINDOW)[: 1 if ends_only else None]
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, k: int) -> Batch:
        i, window = self.windows[k]
        row = self.stored[i]
        return {
            "input_ids": row["input_ids"][window].long(),
            "loss_mask": row["loss_mask"][window],
            "features": row["hidden_states"][window],
            "last": row["last_hidden_state"][window],
        }


def collate(rows: list[Batch]) -> Batch:
    """Right-padded; nothing is learnt at padding."""
    return {
        k: nn.utils.rnn.pad_sequence([row[k] for row in rows], True, (k == "input_ids") * IGNORED)
        for k in rows[0]
    }


class Target:
    """What a drafter shares with its target, and where: embedding, norm, the head of the draft tokens."""

    def __init__(self, root: HiddenStates, vocab_map: Path, device: str = "cpu") -> None:
        files, tables = TargetFiles(root.store), torch.load(vocab_map, weights_only=True)
        self.device, self.norm = torch.device(device), files.final_norm()
        self.is_draft = tables["t2d"].to(device)
        self.draft_ids = (tables["d2t"] + torch.arange(len(tables["d2t"]))).to(device)
        self.embedding = files.weight("embed_tokens").to(device).float()
        self.head = files.weight("lm_head").to(device)[self.draft_ids].float()

    def probabilities(self, last: Tensor) -> Tensor:
        """[..., draft vocabulary], from last states before the norm."""
        return (self.norm(last).float() @ self.head.T).softmax(-1)

    def wrote(self, row: Batch) -> bool:
        """Whether the answers in a stored row are the target's own, written greedily."""
        at = row["loss_mask"].nonzero()[:, 0]
        probabilities = self.probabilities(row["last_hidden_state"][at - 1].to(self.device))
        likeliest = self.draft_ids[probabilities.argmax(-1)].cpu()
        return bool((likeliest == row["input_ids"][at]).float().mean() > 0.8)


def split(stored: HiddenStates, target: Target) -> tuple[list[int], list[int]]:
    """Numbers of the rows to train on, and of those held out, which the target answered itself."""
    if not (held_out := [i for i in range(0, len(stored), HELD_OUT) if target.wrote(stored[i])]):
        raise SystemExit("no row held out has an answer that the target wrote greedily: nothing to measure")
    return sorted({*range(len(stored))} - {*held_out}), held_out


def scaled(x: Tensor) -> Tensor:
    """States of a layer in float32, each to a root mean square of 1."""
    return F.rms_norm(x.float(), x.shape[-1:])


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotary embedding of [B, heads, T, D] at the places [B, T]."""
    half = x.shape[-1] // 2
    angles = places[:, None, :, None] * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Drafter(nn.Module):
    """One decoder layer. Without layers of the target (`num_layers` 0) it sees the tokens alone."""

    def __init__(self, target: Target, num_layers: int) -> None:
        super().__init__()
        hidden = target.embedding.shape[1]
        self.target, self.num_layers, self.heads = target, num_layers, max(1, hidden // 64)
        self.fuse = nn.Linear((num_layers + 1) * hidden, hidden, bias=False)
        self.query_key_value, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden, bias=False)
        self.gate_up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(2 * hidden, hidden, bias=False)
        self.features = nn.Linear(hidden, num_layers * hidden) if num_layers else None
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(3))
        self.norms[2].weight.data.copy_(FIRST_LOGITS * target.norm.weight)
        self.to(target.device)  # only now, so that a seed gives the same weights on every device

    def forward(
        self, features: Tensor, next_ids: Tensor, places: Tensor, past: list[Tensor], sees: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One step for each token.

        From scaled states [B, T, L, H] at the tokens, at `places` [B, T], and the ids [B, T] of those after,
        to the logits [B, T, draft vocabulary] of the second after each and the scaled states at the first.
        `past` has earlier keys and values, and gets theirs; `sees` [B, T, past and T]: who attends to whom.
        """
        embedded = scaled(F.embedding(next_ids, self.target.embedding))
        x = self.fuse(torch.cat([features.flatten(2), embedded], -1))
        x = x + self.attend(self.norms[0](x), places, past, sees)
        up, gate = self.gate_up(self.norms[1](x)).chunk(2, -1)
        x = x + self.down(up * F.silu(gate))
        states = self.features(x) if self.features else x[..., :0]
        states = states.view(*x.shape[:2], self.num_layers, x.shape[-1])
        return self.norms[2](x) @ self.target.head.T, states

    def attend(self, x: Tensor, places: Tensor, past: list[Tensor], sees: Tensor) -> Tensor:
        """Attention of the tokens to earlier ones and among themselves."""
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, places), rotate(key, places)
        for k, kept in enumerate(past):
            past[k] = torch.cat([kept.expand(len(x), -1, -1, -1), (key, value)[k]], 2)
        past[:] = past or [key, value]
        found = F.scaled_dot_product_attention(query, *past, attn_mask=sees[:, None])
        return self.out(found.transpose(1, 2).flatten(2))

    def all_at_once(self, features: Tensor, next_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, Tensor]:
        """`forward` of whole rows [B, T], each token seeing those before it."""
        places = torch.arange(next_ids.shape[1], device=next_ids.device)
        sees = places <= places[:, None]
        return self(features, next_ids, places.expand_as(next_ids), past, sees.expand(len(next_ids), -1, -1))


def loss_of(drafter: Drafter, batch: Batch) -> Tensor:
    """Cross entropy with the target's probabilities, also at prompts, and squared error of the states."""
    ids, features = batch["input_ids"], scaled(batch["features"])
    logits, states = drafter.all_at_once(features[:, :-2], ids[:, 1:-1].clamp(min=0), [])
    is_known = (ids[:, 2:] != IGNORED) & drafter.target.is_draft[ids[:, 2:]]
    known = is_known.nonzero(as_tuple=True)  # once, for a GPU has to be waited for here
    wanted = drafter.target.probabilities(batch["last"][:, 1:-1][known])
    loss = -(wanted * logits[known].log_softmax(-1)).sum(-1).mean()
    return loss + F.mse_loss(states[known], features[:, 1:-1][known]) if drafter.num_layers else loss


def batches(rows: Rows, settings: Settings, device: torch.device) -> Iterator[Batch]:
    """A batch for each step, in shuffled epochs; the same seed gives the same rows in the same order."""
    order, num_windows = torch.Generator().manual_seed(settings.seed), settings.steps * settings.rows
    loader = DataLoader(
        rows,
        batch_size=settings.rows,
        sampler=RandomSampler(rows, num_samples=num_windows, generator=order),
        collate_fn=collate,
        num_workers=settings.workers,
        multiprocessing_context="forkserver" if settings.workers else None,  # spawned ones abort at their end
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        yield {name: values.to(device, non_blocking=True) for name, values in batch.items()}


def train(drafter: Drafter, rows: Rows, settings: Settings) -> Report:
    """Train a drafter in place."""
    losses, waited_s, rate = list[Tensor](), 0.0, settings.learning_rate
    optimizer = torch.optim.AdamW(drafter.parameters(), rate, betas=(0.9, 0.95), fused=True)
    rising = max(0.1, 1.5 / max(2, settings.steps))  # of the steps; a tenth of ten would be none
    schedule = OneCycleLR(optimizer, rate, settings.steps, pct_start=rising, cycle_momentum=False)
    source = batches(rows, settings, drafter.target.device)
    batch, started = next(source), time.perf_counter()  # the first one starts the workers
    for step in range(settings.steps):
        before = time.perf_counter()
        batch = next(source) if step else batch
        waited_s += time.perf_counter() - before
        with torch.autocast(drafter.target.device.type, torch.bfloat16, enabled=settings.bf16):
            loss = loss_of(drafter, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())  # a GPU is not waited for
    values, elapsed_s = torch.stack(losses).tolist(), time.perf_counter() - started
    next(source, None)  # ends the workers
    return Report(losses=values, elapsed_s=elapsed_s, wait_share=waited_s / elapsed_s)


@torch.inference_mode()
def draft(drafter: Drafter, row: Batch, first: int, end: int, num_drafted: int) -> Tensor:
    """[end - first, num_drafted] tokens at each place: the states up to it and one more token are known."""
    device, past = drafter.target.device, list[Tensor]()
    features, ids = scaled(row["features"].to(device))[None, :end], row["input_ids"].to(device)[None]
    logits, states = drafter.all_at_once(features, ids[:, 1 : end + 1], past)
    logits, states = logits[0, first:, None], states[0, first:, None]
    places = torch.arange(first, end, device=device)[:, None]
    sees, tokens = torch.arange(end, device=device) <= places, list[Tensor]()
    for k in range(1, num_drafted + 1):
        tokens.append(drafter.target.draft_ids[logits.argmax(-1)])
        sees = F.pad(sees, (0, 1), value=True)
        logits, states = drafter(scaled(states), tokens[-1], places + k, past, sees[:, None])
    return torch.cat(tokens, 1).cpu()


def acceptance_length(drafter: Drafter, rows: Rows, num_drafted: int) -> float:
    """Tokens a round of speculative decoding over the last answers in `rows`, the target's own included.

    A round drafts tokens after the newest known one, which are accepted up to the first that isn't the
    answer's, and the target adds one: as greedy verification does, for the answers were written greedily.
    """
    num_tokens = num_rounds = 0
    for row in rows:
        end = int(row["loss_mask"].nonzero()[-1]) - 1
        first = max([0, *(row["loss_mask"][:end] == 0).nonzero()[:, 0].tolist()])  # before the last answer
        if end <= first:
            continue
        ahead = torch.arange(first, end)[:, None] + 2 + torch.arange(num_drafted)
        wanted = F.pad(row["input_ids"], (0, num_drafted), value=IGNORED)[ahead]
        hits = draft(drafter, row, first, end, num_drafted) == wanted
        accepted, place = hits.long().cumprod(1).sum(1).tolist(), 0
        while place < end - first:
            num_rounds += 1
            place += accepted[place] + 1
        num_tokens += end - first
    return num_tokens / num_rounds


def main() -> None:
    """Train one drafter, and say how well it drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("vocab_map", type=Path)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--workers", type=int, default=Settings.workers, help="processes that read")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    stored, settings = HiddenStates(options.root), Settings(steps=options.steps, workers=options.workers)
    target, _ = Target(stored, options.vocab_map, options.device), torch.manual_seed(settings.seed)
    drafter, (training, held_out) = Drafter(target, len(stored.spec.layer_ids)), split(stored, target)
    report = train(drafter, Rows(stored, training), settings)
    print(f"loss {report.losses[0]:.3f} to {report.losses[-1]:.3f}, waited for data {report.wait_share:.1%}")
    accepted = acceptance_length(drafter, Rows(stored, held_out, ends_only=True), settings.drafted)
    print(f"acceptance length {accepted:.2f} on {len(held_out)} chats held out")


if __name__ == "__main__":
    main()
