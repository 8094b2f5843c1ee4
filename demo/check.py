"""Checks a root from outside: rows computed again one by one, and an epoch read as a trainer would.

The recomputation shares no code with the extraction: plain Hugging Face `output_hidden_states=True`, one
row at a time, no batching, no padding, no hooks. A row alone and the same row in a batch differ by the
rounding of bf16, for matrix products of other shapes add in another order; both are equally far from float32.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from layertap import HiddenStates
from layertap.catalog import Catalog
from layertap.spec import ExtractionSpec
from layertap.store import Store

NUM_ROWS = 12

ROW_TOLERANCE, TOKEN_TOLERANCE = 0.05, 0.5
"""Of the relative error of a token's state: in the median over a row's tokens, and for each token. Rounding
was seen to reach 0.02 and 0.2; a neighbouring layer is at 0.3 in the median, another token's state at 1."""


class Mismatch(Exception):
    """The store doesn't hold what it should."""


def sample(dataset: HiddenStates) -> list[int]:
    """Rows spread evenly over the stored ones."""
    num_rows = min(NUM_ROWS, len(dataset))
    return [k * len(dataset) // num_rows for k in range(num_rows)]


def stored_states(row: dict[str, Any], spec: ExtractionSpec) -> list[Tensor]:
    """[T, H] for each layer, then the last state if there is one."""
    states = list(row["hidden_states"].unbind(1))
    return [*states, row["last_hidden_state"]] if spec.stores_last else states


def expected_states(model: Any, ids_T: Tensor, spec: ExtractionSpec) -> list[Tensor]:
    """The same by Hugging Face; there the last layer's output is to be had after the final norm only."""
    with torch.inference_mode():
        output = model(input_ids=ids_T.long()[None], output_hidden_states=True, use_cache=False)
    last = (len(output.hidden_states) - 2,) if spec.stores_last else ()
    return [output.hidden_states[k + 1][0] for k in (*spec.layer_ids, *last)]


def relative_errors(model: Any, row: dict[str, Any], spec: ExtractionSpec) -> Iterator[Tensor]:
    """[T] for each state of a row: distance from the expected state of a token over that one's length."""
    expected = expected_states(model, row["input_ids"], spec)
    last_layer = model.config.num_hidden_layers - 1
    ids = [*spec.layer_ids, last_layer][: len(expected)]
    for position, (layer_id, is_TH, should_TH) in enumerate(
        zip(ids, stored_states(row, spec), expected, strict=True)
    ):
        normed = position == len(spec.layer_ids) and spec.last_hidden_state == "post_norm"
        if layer_id == last_layer and not normed:
            is_TH = model.get_decoder().norm(is_TH)
        is_TH, should_TH = is_TH.float(), should_TH.float()
        yield (is_TH - should_TH).norm(dim=-1) / should_TH.norm(dim=-1)


def check_rows(dataset: HiddenStates, spec: ExtractionSpec, target: str) -> str:
    """Compute a sample of rows again; returns a line for the summary.

    Raises:
        Mismatch: they differ by more than noise.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, spec.dtype)).eval()
    rows = sample(dataset)
    with torch.inference_mode():
        errors = [error_T for k in rows for error_T in relative_errors(model, dataset[k], spec)]
    every = torch.cat(errors)
    worst_row, worst_token = max(e.median().item() for e in errors), every.max().item()
    found = (
        f"{len(rows)} rows computed again one by one, {len(every):,} states: relative error "
        f"{every.median().item():.2g} in the median, {worst_row:.2g} in the worst row, "
        f"{worst_token:.2g} in the worst token"
    )
    if not (worst_row <= ROW_TOLERANCE and worst_token <= TOKEN_TOLERANCE):
        raise Mismatch(f"{found}; allowed are {ROW_TOLERANCE} for a row and {TOKEN_TOLERANCE} for a token")
    return f"{found} (allowed: {ROW_TOLERANCE} and {TOKEN_TOLERANCE})"


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad rows to a batch as a drafter's trainer does: features [B, T, L·H], ids and mask [B, T]."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"].long() for row in rows], batch_first=True),
        "loss_mask": pad([row["loss_mask"] for row in rows], batch_first=True),
        "features": pad([row["hidden_states"].flatten(1) for row in rows], batch_first=True),
        "row": torch.tensor([row["row"] for row in rows]),
    }


def check_epoch(dataset: HiddenStates) -> str:
    """Read one shuffled epoch with two workers; returns a line for the summary.

    Raises:
        Mismatch: a row came twice or never, or a state isn't finite.
    """
    loader = DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        collate_fn=collate,
        num_workers=2,
        multiprocessing_context="forkserver",
    )
    seen: list[int] = []
    num_supervised = 0
    for batch in loader:
        seen += batch["row"].tolist()
        num_supervised += int(batch["loss_mask"].sum())
        if not batch["features"].isfinite().all():
            raise Mismatch(f"a state of the rows {batch['row'].tolist()} is not finite")
    if len(seen) != len(dataset) or len(set(seen)) != len(seen):
        raise Mismatch(
            f"an epoch gave {len(set(seen)):,} different rows in {len(seen):,} of {len(dataset):,}"
        )
    return f"an epoch of {len(seen):,} rows through a DataLoader: {num_supervised:,} supervised tokens"


def check(root: str, target: str) -> list[str]:
    """Check the root at `root` against the target's folder; returns lines for the summary."""
    spec = Catalog(Store.open(root)).root().spec
    dataset = HiddenStates(root)
    return [check_rows(dataset, spec, target), check_epoch(dataset)]


def main(arguments: Sequence[str]) -> None:
    """`python demo/check.py ROOT TARGET`."""
    try:
        print("\n".join(check(*arguments)))
    except Mismatch as error:
        sys.exit(f"the store is wrong: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
