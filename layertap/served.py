"""Whether stored states are those of the model that is served: the same tokens, with the same probabilities.

The stored last hidden state of a token gives, through the target's final norm and head, the probabilities of
the next token; the server gives its own for the same tokens. Both see the stored token ids, so a chat
template that the server would render otherwise can't show here, unless it changes the prompt's tokens.

Shapes: S supervised tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layertap.catalog import Catalog
from layertap.endpoint import Endpoint
from layertap.errors import CatalogError, EndpointError, FidelityError, LayertapError, SpecError, TooLongError
from layertap.fidelity import Fidelity, record
from layertap.reader import HiddenStates
from layertap.records import now
from layertap.store import Store
from layertap.target_files import TargetFiles

MIN_AGREEMENT = 0.95

VOCAB_CHUNK = 16_384
"""Rows of the head that are widened to float32 at a time."""

LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "output_logit_soft_cap",
)
"""Fields of a config that say that logits are more than the head's product, unless they are 1 or nothing."""


@dataclass(frozen=True, eq=False)
class Head:
    """From a last hidden state to the next token's probabilities, in float32."""

    norm: Any
    """The final norm, [..., H] to [..., H]; None where the states are stored after it."""

    weight: Tensor
    """[V, H]"""

    @classmethod
    def of_root(cls, states: HiddenStates) -> "Head":
        """The head of the target that a root's states are of.

        Raises:
            SpecError: the root has no last hidden states, or the target changes its logits after the head.
            CatalogError: the root lacks the head or the norm; says why.
        """
        if not states.spec.stores_last:
            raise SpecError(
                f"{states.store.uri} stores no last hidden state to compute probabilities from: extract with "
                "--last-hidden-state pre_norm"
            )
        files = TargetFiles(states.store)
        config = {**files.config, **files.config.get("text_config", {})}
        if changes := {name: config[name] for name in LOGIT_CHANGES if config.get(name) not in (None, 0, 1)}:
            raise SpecError(
                f"this target changes its logits after the head, which isn't computed here: {changes}"
            )
        is_normed = states.spec.last_hidden_state == "post_norm"
        return cls(norm=None if is_normed else files.final_norm(), weight=files.weight("lm_head"))

    def top1_and_logprobs(self, last_SH: Tensor, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        """For each state the most probable next token, and the log probability of a given one.

        Returns:
            [S] int64, and [S] float32.
        """
        x_SH = (last_SH if self.norm is None else self.norm(last_SH)).float()
        best_S = torch.full((len(x_SH),), -torch.inf)
        top1_S, total_S = torch.zeros(len(x_SH), dtype=torch.int64), best_S.clone()
        for start in range(0, len(self.weight), VOCAB_CHUNK):
            logits = x_SH @ self.weight[start : start + VOCAB_CHUNK].float().T
            values, places = logits.max(dim=1)
            top1_S = torch.where(values > best_S, places + start, top1_S)
            best_S = torch.maximum(best_S, values)
            total_S = torch.logaddexp(total_S, logits.logsumexp(dim=1))
        own_S = (x_SH * self.weight[ids_S].float()).sum(dim=1)
        return top1_S, own_S - total_S


def check_served(
    store: Store,
    endpoint: str,
    *,
    model: str | None = None,
    num_rows: int = 32,
    version: int | None = None,
) -> Fidelity:
    """Ask a model server about rows of a version, compare, and write the result down beside the version.

    Args:
        store: the root.
        endpoint: address of a server with vLLM's or SGLang's API.
        model: the served model's name; may be left out where the server has only one.
        num_rows: rows to look at, spread evenly over the version; asked about are those of them with a
            supervised token. Those that are too long for the server are left out and counted.
        version: which version; by default the newest complete one.

    Raises:
        FidelityError: they agree on less than 95 % of the tokens; recorded all the same.
        EndpointError: the server can't be asked, or half of the rows are too long for it.
        CatalogError, SpecError: the root can't be compared; says why.
    """
    states = HiddenStates(store, version=version)
    head = Head.of_root(states)
    with Endpoint(endpoint, model=model) as server:
        compared, refusals = _compare_all(head, server, _spread(states, num_rows))
        if len(compared) <= len(refusals):
            raise _too_few_to_compare(states, num_rows, refusals)
        same, difference = (np.concatenate(parts) for parts in zip(*compared, strict=True))
        found = Fidelity(
            version=states.version.number,
            endpoint=server.address,
            model=server.model,
            api=str(server.api),
            num_rows=len(compared),
            num_tokens=len(same),
            agreement=float(same.mean()),
            mean_abs_logprob_difference=float(difference.mean()),
            min_agreement=MIN_AGREEMENT,
            created_at=now(),
            num_too_long=len(refusals),
            refusal=refusals[0] if refusals else "",
        )
    record(store, found)
    if not found.passed:
        raise FidelityError(_suspects(found, states))
    return found


def _compare_all(
    head: Head, server: Endpoint, rows: Iterable[dict[str, Any]]
) -> tuple[list[tuple[Any, Any]], list[str]]:
    """What is found of each row, and what the server said to those that are too long for it."""
    compared, refusals = list[tuple[Any, Any]](), list[str]()
    for row in rows:
        try:
            compared.append(_compare(head, server, row))
        except TooLongError as error:
            refusals.append(str(error))
    return compared, refusals


def _too_few_to_compare(states: HiddenStates, num_rows: int, refusals: Sequence[str]) -> LayertapError:
    if refusals:
        return EndpointError(
            f"{len(refusals)} of the rows with a supervised token that were looked at are too long for the "
            "server, half of them or more: serve a longer context (vLLM's --max-model-len, SGLang's "
            f"--context-length), or look at more with --rows. {refusals[0]}"
        )
    return CatalogError(
        f"none of the {num_rows} rows of version {states.version.number} that were looked at has a "
        "supervised token to compare: look at more with --rows"
    )


def _compare(head: Head, server: Endpoint, row: dict[str, Any]) -> tuple[Any, Any]:
    """For each supervised token of a row: whether both agree on the most probable one, and |Δ logprob|."""
    at_S = _predicted(row["loss_mask"])
    served = server.logprobs(row["input_ids"].tolist())
    top1_S, logprobs_S = head.top1_and_logprobs(
        row["last_hidden_state"][at_S - 1], row["input_ids"][at_S].long()
    )
    theirs_S = at_S.numpy() - 1  # what a server says begins with the second token
    same_S = top1_S.numpy() == served.top1[theirs_S]
    return same_S, np.abs(logprobs_S.numpy() - served.logprobs[theirs_S])


def _predicted(loss_mask: Tensor) -> Tensor:
    """Positions of supervised tokens; the first token is predicted by nothing."""
    return loss_mask[1:].nonzero()[:, 0] + 1


def _spread(states: HiddenStates, num_rows: int) -> Iterator[dict[str, Any]]:
    """Rows spread evenly over a version, without those that have no supervised token."""
    for i in np.linspace(0, len(states) - 1, min(num_rows, len(states)), dtype=np.int64).tolist():
        row = states[i]
        if len(_predicted(row["loss_mask"])):
            yield row


def _suspects(found: Fidelity, states: HiddenStates) -> str:
    template = states.version.provenance.get("template", "not recorded")
    quantization = Catalog(states.store).root().target.get("quantization") or "none"
    return (
        f"the stored states aren't those of {found.model} at {found.endpoint}: top-1 agreement "
        f"{found.agreement:.3f} on {found.num_tokens:,} tokens of {found.num_rows} rows is below "
        f"{found.min_agreement} (mean |Δ logprob| {found.mean_abs_logprob_difference:.3f}), and a drafter "
        "trained on them would be accepted less. Suspects:\n"
        f"  template: the rows were rendered with {template}; another one, or tokens that the server adds\n"
        f"  norm: stored is {states.spec.last_hidden_state}; the server's final norm may be of another kind\n"
        f"  checkpoint: the states are of {states.spec.target_identity}; the server may have another one\n"
        f"  quantisation: the states were computed in {states.spec.dtype}, quantisation {quantization}; the "
        "server's weights or KV cache may be quantised otherwise"
    )
