"""Log probabilities of given tokens by a model server: vLLM's OpenAI-compatible API, or SGLang's own.

vLLM answers `/v1/completions` with `prompt_logprobs`, by token id. SGLang's `/v1/completions` can only echo
tokens as text, from which an id can't be told for certain, so its `/generate` is asked instead.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from layertap.errors import EndpointError, TooLongError

Api = Literal["vllm", "sglang"]

TIMEOUT_S = 300.0

API_KEY = "OPENAI_API_KEY"
"""Environment variable with the server's key, if it asks for one."""

MAX_SHOWN = 300
"""Characters of a server's complaint that are shown."""

TOO_LONG = re.compile("context length|(?:longer than|exceeds) .*length|too long", re.IGNORECASE)
"""How servers refuse a prompt that is too long. What they take may be less than the `max_model_len` that they
tell: SGLang keeps a few tokens for itself, and fewer may fit into its cache."""

OF_OTHER_FORM = (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration)
"""What reading an answer raises that isn't of the expected form."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptLogprobs:
    """What a server says of the tokens of a row, but for the first, which nothing predicts."""

    top1: NDArray[np.int64]
    """[T - 1] the most probable token at each position from the second on."""

    logprobs: NDArray[np.float64]
    """[T - 1] natural logarithm of the probability of the token that is there."""


class Endpoint:
    """A model server.

    Args:
        url: its address, such as `http://host:8000` or `http://host:8000/v1`.
        model: the served model's name; may be left out where the server has only one.

    Raises:
        EndpointError: it doesn't answer, or has several models, or none of that name.
    """

    def __init__(self, url: str, *, model: str | None = None) -> None:
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise EndpointError(f"{url!r} is no server's address such as http://host:8000/v1")
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=headers)
        self._api: Api | None = None
        self.model = self._choose_model(model)

    @property
    def api(self) -> Api | None:
        """Which of the two APIs gives the log probabilities; None before the first row."""
        return self._api

    @property
    def address(self) -> str:
        """Scheme, host and port: what may be written down, without a password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    def logprobs(self, input_ids: Sequence[int]) -> PromptLogprobs:
        """The model's log probabilities of a row's tokens.

        Raises:
            TooLongError: the server takes no prompt as long as this.
            EndpointError: the server fails, or answers for other tokens or in another form.
        """
        if self._api is None:
            self._api, found = self._find_api(input_ids)
            return found
        return self._vllm(input_ids) if self._api == "vllm" else self._sglang(input_ids)

    def _find_api(self, input_ids: Sequence[int]) -> tuple[Api, PromptLogprobs]:
        answer = self._complete(input_ids)
        if _choice(answer).get("prompt_logprobs") is not None:
            return "vllm", _of_vllm(answer, input_ids)
        try:
            return "sglang", self._sglang(input_ids)
        except EndpointError as error:
            raise EndpointError(
                f"{self.address} gives no log probabilities of a prompt by token id: neither as vLLM does, "
                f"prompt_logprobs in /v1/completions, nor as SGLang does, by /generate ({error})"
            ) from error

    def _vllm(self, input_ids: Sequence[int]) -> PromptLogprobs:
        return _of_vllm(self._complete(input_ids), input_ids)

    def _complete(self, input_ids: Sequence[int]) -> Any:
        return self._ask(
            "POST",
            "/v1/completions",
            {
                "model": self.model,
                "prompt": list(input_ids),
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": 1,
            },
        )

    def _sglang(self, input_ids: Sequence[int]) -> PromptLogprobs:
        question = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
        }
        return _of_sglang(self._ask("POST", "/generate", question), input_ids)

    def _choose_model(self, name: str | None) -> str:
        try:
            names = [str(model["id"]) for model in self._ask("GET", "/v1/models")["data"]]
        except OF_OTHER_FORM as error:
            raise EndpointError(f"{self.address}/v1/models is no list of models") from error
        if name is None and len(names) == 1:
            return names[0]
        if name not in names:
            asked = "which of them is meant" if name is None else f"not {name!r}"
            raise EndpointError(f"{self.address} serves {', '.join(names)}, {asked}: give --model")
        return name

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        import httpx

        try:
            answer = self._client.request(method, path, json=body)
            if answer.is_error:
                said = answer.text[:MAX_SHOWN]
                is_too_long = answer.status_code == httpx.codes.BAD_REQUEST and TOO_LONG.search(said)
                kind = TooLongError if is_too_long else EndpointError
                raise kind(f"{self.address}{path} answers {answer.status_code}: {said}")
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EndpointError(f"{self.address}{path} doesn't answer: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _choice(answer: Any) -> Mapping[str, Any]:
    try:
        choice: Mapping[str, Any] = dict(answer["choices"][0])
        return choice
    except OF_OTHER_FORM as error:
        raise EndpointError(f"no completion with choices: {str(answer)[:MAX_SHOWN]}") from error


def _of_vllm(answer: Any, input_ids: Sequence[int]) -> PromptLogprobs:
    """From `[None, {"<id>": {"logprob": …, "rank": …}, …}, …]`: the best token, and that of the prompt."""
    found: Any = _choice(answer).get("prompt_logprobs")
    try:
        _check_length(found, input_ids)
        top1 = [next(int(k) for k, v in by_id.items() if v["rank"] == 1) for by_id in found[1:]]
        own = [by_id[str(k)]["logprob"] for by_id, k in zip(found[1:], input_ids[1:], strict=True)]
        return PromptLogprobs(top1=np.array(top1, np.int64), logprobs=_numbers(own))
    except OF_OTHER_FORM as error:
        raise EndpointError(f"prompt_logprobs of another form: {str(found)[:MAX_SHOWN]}") from error


def _of_sglang(answer: Any, input_ids: Sequence[int]) -> PromptLogprobs:
    """From `[[logprob, id, text], …]` for the prompt's tokens, and a list of such lists for the best ones."""
    try:
        own, best = (answer["meta_info"][f"input_{name}_logprobs"] for name in ("token", "top"))
        _check_length(own, input_ids)
        if [entry[1] for entry in own] != list(input_ids):
            raise EndpointError("the server's prompt isn't the row: it holds other token ids")
        pairs = list(zip(own, best, strict=True))[1:]
        top1 = [entries[0][1] for _, entries in pairs]
        logprobs = _numbers([entry[0] for entry, _ in pairs])
        return PromptLogprobs(top1=np.array(top1, np.int64), logprobs=logprobs)
    except OF_OTHER_FORM as error:
        raise EndpointError(f"/generate answers in another form: {str(answer)[:MAX_SHOWN]}") from error


def _check_length(found: Any, input_ids: Sequence[int]) -> None:
    if len(found) != len(input_ids):
        raise EndpointError(
            f"the server's prompt has {len(found)} tokens where the row has {len(input_ids)}: it adds or "
            "drops some (a template, a token for the beginning of a text), so its states can't be the stored "
            "ones"
        )


def _numbers(logprobs: Sequence[Any]) -> NDArray[np.float64]:
    """As an array; numpy would take a null for NaN, and the check would record it."""
    found = np.array([float(value) for value in logprobs])
    if not np.isfinite(found).all():
        raise ValueError("a log probability isn't finite")
    return found
