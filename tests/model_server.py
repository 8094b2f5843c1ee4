"""A model server for tests: a real model behind real HTTP, with the answers of vLLM or of SGLang.

Forms of the answers after vLLM 0.2x (`/v1/completions` with `prompt_logprobs`) and SGLang (`/generate`).
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


@dataclass(kw_only=True)
class ModelServer:
    """What is served, and how."""

    model: Any
    api: str = "vllm"
    names: Sequence[str] = ("tiny",)

    prefix: Sequence[int] = ()
    """Tokens that the server puts before each prompt."""

    context: int | None = None
    """Tokens of a prompt and the one written after it, at most."""

    api_key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """The prompt that the model sees, T tokens, and [T - 1, V] log probabilities of its tokens."""
        prompt = [*self.prefix, *ids]
        device = next(self.model.parameters()).device
        logits = self.model(torch.tensor([prompt], device=device)).logits[0, :-1]
        return prompt, logits.float().log_softmax(-1).cpu()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """What the server says; None where it has no such path."""
        self.asked.append({"path": path, **body})
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]}
        if path == "/v1/completions":
            return self._completion(body)
        return self._generated(body) if path == "/generate" and self.api == "sglang" else None

    def refusal(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """What the server says to a prompt that is too long, with status 400."""
        num_tokens = len(body.get("prompt") or body.get("input_ids") or [])
        if self.context is None or num_tokens < self.context:
            return None
        if self.api == "sglang":
            theirs = f"the model's context length ({self.context} tokens)"
            return {"error": {"message": f"The input ({num_tokens} tokens) is longer than {theirs}."}}
        said = f"This model's maximum context length is {self.context} tokens."
        return {"error": {"message": said, "type": "BadRequestError", "code": 400}}

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": " x", "logprobs": None, "finish_reason": "length"}
        if self.api == "vllm" and body.get("prompt_logprobs") is not None:
            prompt, logprobs = self.logprobs(body["prompt"])
            choice["prompt_logprobs"] = [None, *map(_by_id, logprobs, prompt[1:])]
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, logprobs = self.logprobs(body["input_ids"])
        own = [[lp[k].item(), k, None] for lp, k in zip(logprobs, prompt[1:], strict=True)]
        best = [[[lp.max().item(), int(lp.argmax()), None]] for lp in logprobs]
        meta = {
            "input_token_logprobs": [[None, prompt[0], None], *own],
            "input_top_logprobs": [None, *best],
        }
        return {"text": " x", "meta_info": meta}


def _by_id(logprobs_V: torch.Tensor, own: int) -> dict[str, dict[str, Any]]:
    """The most probable token and the prompt's, as vLLM puts them for `prompt_logprobs=1`."""
    ids = dict.fromkeys([own, int(logprobs_V.argmax())])
    return {
        str(k): {
            "logprob": logprobs_V[k].item(),
            "rank": 1 + int((logprobs_V > logprobs_V[k]).sum()),
            "decoded_token": f"w{k}",
        }
        for k in ids
    }


@contextmanager
def serving(server: ModelServer) -> Iterator[str]:
    """Serve on a free port; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say({})

        def do_POST(self) -> None:
            self._say(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _say(self, body: dict[str, Any]) -> None:
            if server.api_key and self.headers.get("Authorization") != f"Bearer {server.api_key}":
                status, said = 401, {"error": "Unauthorized"}
            elif (refusal := server.refusal(body)) is not None:
                status, said = 400, refusal
            else:
                said = server.answer(self.path, body)
                status = 404 if said is None else 200
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
