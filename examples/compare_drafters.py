"""What wrong states cost: one drafter on right states, and on states that are wrong in one way each.

    layertap run tokens/ --target TARGET --layers 0,1,13,14,25,26 --root NAME
    layertap vocab-map ROOT --draft-vocab 3072 --out map.pt
    python examples/compare_drafters.py ROOT map.pt outcomes/ --plot docs/drafter.png

All drafters are trained alike and measured alike: with the right states, as a server hands them out. So the
controls are what happens to users whose extraction was labelled wrongly; a drafter that is trained and served
with the same wrong layer may not suffer, so that is measured too: what the same weights lose by being served
with the right states tells what the label costs. Layers 0, 13 and 25 are stored for that control only.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from train_drafter import Batch, Drafter, Rows, Settings, Target, acceptance_length, split, train

from layertap import HiddenStates
from layertap.catalog import Catalog

RIGHT, ONE_LOWER = (1, 3, 5), (0, 2, 4)
"""Places of layers 1, 14, 26 and of 0, 13, 25 among the stored ones."""


class ArmRows(Rows):
    """Windows with some of the stored layers, or with the states of other rows."""

    def __init__(
        self,
        stored: HiddenStates,
        numbers: Sequence[int],
        layers: Sequence[int],
        *,
        shuffled: bool = False,
        ends_only: bool = False,
    ) -> None:
        super().__init__(stored, numbers, ends_only=ends_only)
        self.layers, self.shuffled = list(layers), shuffled

    def states(self, i: int) -> tuple[Tensor, Tensor]:
        """[T, L, H] of the stored layers and [T, H] of the last, of a whole row."""
        row = self.stored[i]
        return row["hidden_states"], row["last_hidden_state"]

    def __getitem__(self, k: int) -> Batch:
        i, window = self.windows[k]
        row = self.stored[i]
        other, _ = self.windows[(k + len(self) // 2) % len(self)]
        layers, last = self.states(other if self.shuffled else i)
        places = torch.arange(window.start, window.stop) % len(last)  # of another row, repeated if shorter
        return {
            "input_ids": row["input_ids"][window].long(),
            "loss_mask": row["loss_mask"][window],
            "features": layers[places][:, self.layers],
            "last": last[places],
        }


class LiveRows(ArmRows):
    """Windows whose states plain transformers computes now, one row at a time, and keeps."""

    def __init__(
        self, stored: HiddenStates, numbers: Sequence[int], layers: Sequence[int], *, device: str = "cpu"
    ) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(stored, numbers, layers)
        source, dtype = Catalog(stored.store).root().target["source"], getattr(torch, stored.spec.dtype)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        self.backbone = model.get_decoder().to(device)
        self.last: list[Tensor] = []
        self.backbone.layers[-1].register_forward_hook(lambda _m, _a, out: self.last.append(out))
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def states(self, i: int) -> tuple[Tensor, Tensor]:
        """As stored, but computed."""
        if i not in self.kept:
            ids_BT = self.stored[i]["input_ids"].long()[None].to(self.backbone.device)
            out = self.backbone(ids_BT, output_hidden_states=True, use_cache=False)
            layers = [out.hidden_states[k + 1][0] for k in self.stored.spec.layer_ids]
            self.kept[i] = torch.stack(layers, 1).cpu(), self.last.pop()[0].cpu()
        return self.kept[i]


class NormedTwice(Target):
    """A target whose states are taken for those before its final norm, but have been through it."""

    def probabilities(self, last: Tensor) -> Tensor:
        """As the right ones are made, from states that have been normed."""
        return super().probabilities(self.norm(last))


@dataclass(kw_only=True)
class Outcome:
    """What came of an arm."""

    losses: list[float]
    wait_share: float
    elapsed_s: float
    acceptance_length: float

    acceptance_length_as_trained: float
    """Where the drafter is served with the layers that it was trained on, right or not."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a drafter is trained on."""

    layers: tuple[int, ...] = RIGHT
    normed_twice: bool = False
    shuffled: bool = False


ARMS = {
    "right states": Arm(),
    "layer ids off by one": Arm(layers=ONE_LOWER),
    "norm applied twice": Arm(normed_twice=True),
    "rows shuffled": Arm(shuffled=True),
    "tokens only": Arm(layers=()),
}


def run_arm(arm: Arm, stored: HiddenStates, vocab_map: Path, settings: Settings, device: str) -> Outcome:
    """Train a drafter on what the arm has, and measure it on the right states."""
    target = Target(stored, vocab_map, device)
    training, held_out = split(stored, target)
    taught = NormedTwice(stored, vocab_map, device) if arm.normed_twice else target
    torch.manual_seed(settings.seed)
    drafter = Drafter(taught, len(arm.layers))
    report = train(drafter, ArmRows(stored, training, arm.layers, shuffled=arm.shuffled), settings)
    drafter.target = target
    right = RIGHT if arm.layers else ()
    accepted = {
        layers: acceptance_length(
            drafter, ArmRows(stored, held_out, layers, ends_only=True), settings.drafted
        )
        for layers in {right, arm.layers}
    }
    return Outcome(
        **asdict(report),
        acceptance_length=accepted[right],
        acceptance_length_as_trained=accepted[arm.layers],
    )


def outcome_of(name: str, folder: Path, run: Callable[[Arm], Outcome]) -> Outcome:
    """The outcome in `folder`, or that of a run, which is put there."""
    path = folder / f"{name.replace(' ', '-')}.json"
    if not path.exists():
        path.write_text(json.dumps(asdict(run(ARMS[name]))))
    outcome = Outcome(**json.loads(path.read_text()))
    print(
        f"{name:24} last loss {sum(outcome.losses[-10:]) / 10:.3f}, acceptance length "
        f"{outcome.acceptance_length:.3f} ({outcome.acceptance_length_as_trained:.3f} on what it was trained "
        f"on), waited for data {outcome.wait_share:.2%} of {outcome.elapsed_s:.0f} s",
        flush=True,
    )
    return outcome


def live_difference(stored: HiddenStates, vocab_map: Path, settings: Settings, device: str) -> float:
    """The largest difference of the losses of two trainings: on the store, and on live states."""
    target, losses = Target(stored, vocab_map, device), []
    training, _ = split(stored, target)
    for rows in (ArmRows(stored, training, RIGHT), LiveRows(stored, training, RIGHT, device=device)):
        torch.manual_seed(settings.seed)
        drafter = Drafter(target, len(RIGHT))
        losses.append(train(drafter, rows, replace(settings, bf16=False, workers=0)).losses)
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


def plot(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Loss by step, and acceptance length, of all arms."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, outcome in outcomes.items():
        losses = torch.tensor(outcome.losses).unfold(0, 10, 1).mean(1)
        left.plot(range(10, 10 + len(losses)), losses, label=name)
    left.set(xlabel="step", ylabel="loss, against what the arm is taught (mean of 10)")
    left.legend(fontsize=8)
    bars = right.barh([*outcomes], [outcome.acceptance_length - 1 for outcome in outcomes.values()], left=1)
    right.bar_label(bars, [f"{outcome.acceptance_length:.2f}" for outcome in outcomes.values()], padding=3)
    right.set(xlabel="acceptance length (chats held out, right states)")
    right.invert_yaxis()
    right.margins(x=0.15)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main() -> None:
    """Compare, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("vocab_map", type=Path)
    parser.add_argument("outcomes", type=Path, help="folder; arms with an outcome there aren't trained again")
    parser.add_argument("--arm", choices=ARMS, action="append", help="only this one; may be repeated")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--workers", type=int, default=Settings.workers, help="processes that read")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true", help="train with products in bfloat16")
    parser.add_argument("--live", type=int, default=0, help="so many steps on live states too, in float32")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.outcomes.mkdir(parents=True, exist_ok=True)
    settings = Settings(steps=options.steps, seed=options.seed, bf16=options.bf16, workers=options.workers)
    stored, device = HiddenStates(options.root), options.device
    run = partial(run_arm, stored=stored, vocab_map=options.vocab_map, settings=settings, device=device)
    outcomes = {name: outcome_of(name, options.outcomes, run) for name in options.arm or ARMS}
    if options.live:
        short = replace(settings, steps=options.live)
        found = live_difference(stored, options.vocab_map, short, device)
        print(f"{options.live} steps: losses on stored and on live states differ by {found:.1e} at most")
    if options.plot:
        plot(outcomes, options.plot)


if __name__ == "__main__":
    main()
