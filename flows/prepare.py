"""From chats to a tokenised dataset."""

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import OPTIONS
from flows.parameters import Preparation
from layertap.prepare import prepare_chats


@flow(name="prepare_dataset", **OPTIONS)
def prepare_dataset(preparation: Preparation) -> State[Any]:
    """Tokenise chats with the target's template; the loss mask marks the assistant's tokens."""
    prepared = prepare_chats(
        preparation.source,
        preparation.out,
        tokenizer=preparation.tokenizer,
        revision=preparation.revision or None,
        template=preparation.template or None,
        template_arguments=preparation.template_arguments,
        max_length=preparation.max_length or None,
        responses=preparation.responses,
    )
    return Completed(
        message=f"{prepared.num_rows:,} rows, {prepared.num_tokens:,} tokens in {prepared.path}; "
        f"{len(prepared.refused):,} lines refused"
    )
