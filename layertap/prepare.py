"""From chats to a tokenised dataset with a loss mask and a record of where it comes from.

**In**: JSONL, one chat a line: `{"messages": [{"role": ..., "content": ...}, ...]}`, optionally with `"id"`
(text or a number; `line-<number>` without) and `"tools"`. Other keys are not read. Blank lines are skipped.
A line that is no chat, that the template refuses, that holds images, or in which no token would be trained
on is refused with its number, counted from 1; the others go on.

**Out**: a folder as Hugging Face `save_to_disk` writes it, complete or not there at all:

    data-00000-of-00001.arrow   Arrow stream: input_ids list<int32>, loss_mask list<int8> (1 on the tokens
                                that the template's generation blocks rendered), id string
    state.json                  the order of the data files
    dataset_info.json
    provenance.json             source, tokenizer and template (name and sha256), template arguments,
                                max_length, who wrote the responses, counts, versions

The loss mask comes from the template alone, because differences of rendered prefixes go wrong with templates
that drop earlier thinking. A template without a `{% generation %}` block is an error, never an empty mask.
"""

import hashlib
import json
import logging
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa

from layertap import __version__
from layertap.errors import DatasetError, TargetError, TemplateError

logger = logging.getLogger(__name__)

SHIPPED_TEMPLATES = ("chatml",)

DATA_FILE = "data-00000-of-00001.arrow"

BATCH_ROWS = 1000
"""Rows of a record batch, as `datasets` writes them."""

COLUMNS: Mapping[str, pa.DataType] = {
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.int8()),
    "id": pa.string(),
}

SCHEMA = pa.schema(COLUMNS)

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template, a program that others wrote, raises on a chat it wasn't written for."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare_chats` made."""

    path: Path
    num_rows: int
    num_tokens: int

    num_supervised: int
    """Tokens under the loss mask."""

    num_truncated: int

    refused: Mapping[int, str]
    """Line number, from 1 -> one sentence with that number."""

    provenance: Mapping[str, Any]
    """What provenance.json holds."""


def prepare_chats(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path,
    template: str | Path | None = None,
    revision: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    responses: str | Mapping[str, Any] = "unknown",
) -> Prepared:
    """Tokenise the chats in the JSONL file `source` into the new folder `out`.

    Args:
        source: JSONL of chats.
        out: folder to make; it must not exist yet.
        tokenizer: hub id, or a folder with a tokenizer.
        template: a template file, or `chatml`, which is shipped; the tokenizer's own without.
        revision: of the hub id.
        template_arguments: variables of the template, such as `enable_thinking`.
        max_length: tokens of a chat that are kept; all of them without.
        responses: who wrote them: "original", "unknown", or model, quantisation, engine and sampling.

    Raises:
        DatasetError: the source is missing or not one of its lines is a usable chat, or `out` exists.
        TargetError: the tokenizer can't be loaded, or has no fast version, which the mask needs.
        TemplateError: the template is missing, broken or without a generation block.
    """
    source, out = Path(source), Path(out)
    if not source.is_file():
        raise DatasetError(f"{source} is not a file; give chats as JSONL, one {{'messages': [...]}} a line")
    if out.exists():
        raise DatasetError(f"{out} exists; nothing is overwritten: name another folder or remove it first")
    loaded = _load_tokenizer(tokenizer, revision)
    template_name, template_text = _load_template(template, loaded)
    arguments = dict(template_arguments or {})
    if responses == "unknown":
        logger.warning(
            "who wrote the responses in %s is recorded as unknown; drafters depend on it", source.name
        )
    chats = _Chats(source, _Renderer(loaded, template_text, arguments, max_length))
    with _new_folder(out) as folder:
        _write_rows(chats, folder / DATA_FILE)
        provenance = {
            "source": {"name": source.name, "sha256": chats.sha256.hexdigest(), "num_lines": chats.num_lines},
            "tokenizer": {"name": str(tokenizer), "revision": revision, "sha256": _tokenizer_hash(loaded)},
            "template": {"name": template_name, "sha256": hashlib.sha256(template_text.encode()).hexdigest()},
            "template_arguments": arguments,
            "max_length": max_length,
            "responses": responses if isinstance(responses, str) else dict(responses),
            "num_rows": chats.num_rows,
            "num_refused": len(chats.refused),
            "num_truncated": chats.num_truncated,
            "versions": _versions(),
        }
        _write_metadata(folder, provenance)
    return Prepared(
        path=out,
        num_rows=chats.num_rows,
        num_tokens=chats.num_tokens,
        num_supervised=chats.num_supervised,
        num_truncated=chats.num_truncated,
        refused=chats.refused,
        provenance=provenance,
    )


def _load_tokenizer(name: str | Path, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(name), revision=revision or "main")
    except (OSError, ValueError) as error:
        raise TargetError(f"no tokenizer can be loaded from {str(name)!r}: {error}") from error
    if not loaded.is_fast:
        raise TargetError(f"the tokenizer {str(name)!r} has no fast version, which the loss mask needs")
    return loaded


def _load_template(template: str | Path | None, tokenizer: Any) -> tuple[str, str]:
    """Name and text of the template, which has a generation block."""
    if template is None:
        name, text = "the tokenizer's own", _own_template(tokenizer)
    elif str(template) in SHIPPED_TEMPLATES:
        name, text = f"layertap {template}", (files("layertap") / f"templates/{template}.jinja").read_text()
        _require_chatml(tokenizer)
    elif Path(template).is_file():
        name, text = Path(template).name, Path(template).read_text()
    else:
        raise TemplateError(
            f"there is no template file {template}; shipped is {', '.join(SHIPPED_TEMPLATES)}"
        )
    if not GENERATION_BLOCK.search(text):
        raise TemplateError(
            f"the chat template ({name}) has no {{% generation %}} block, so it can't tell which tokens the "
            "assistant wrote. Give one that has: --template FILE, or --template chatml for ChatML tokenizers"
        )
    return name, text


def _own_template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise TemplateError(
            f"the tokenizer brings no chat template; give one with --template FILE: {error}"
        ) from error


def _require_chatml(tokenizer: Any) -> None:
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.get_added_vocab()]
    if missing:
        raise TemplateError(
            f"the tokenizer has no token {' and no '.join(missing)}: its chats are not in ChatML"
        )


def _tokenizer_hash(tokenizer: Any) -> str:
    """sha256 over the tokenizer as it works: vocabulary, merges, normaliser and special tokens."""
    text = tokenizer.backend_tokenizer.to_str() + json.dumps(tokenizer.special_tokens_map, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    foreign = ("transformers", "tokenizers", "jinja2")
    return {"layertap": __version__, **{name: version(name) for name in foreign}}


@dataclass(frozen=True)
class _Row:
    input_ids: list[int]
    loss_mask: list[int]
    row_id: str
    is_truncated: bool


@dataclass(frozen=True)
class _Renderer:
    """One chat to one row; a DatasetError says what is wrong with the chat."""

    tokenizer: Any
    template: str
    arguments: dict[str, Any]
    max_length: int | None

    def row(self, line: bytes, number: int) -> _Row:
        chat = _parse(line)
        ids, mask = self._tokenise(chat)
        row_id = chat.get("id")
        row = _Row(
            input_ids=ids[: self.max_length],
            loss_mask=mask[: self.max_length],
            row_id=f"line-{number}" if row_id is None else str(row_id),
            is_truncated=self.max_length is not None and len(ids) > self.max_length,
        )
        if not any(row.loss_mask):
            where = f"the first {self.max_length} of its {len(ids)} tokens" if row.is_truncated else "it"
            raise DatasetError(f"nothing in {where} is under the loss mask: no text of an assistant")
        return row

    def _tokenise(self, chat: dict[str, Any]) -> tuple[list[int], list[int]]:
        try:
            tokens = self.tokenizer.apply_chat_template(
                chat["messages"],
                tools=chat.get("tools"),
                chat_template=self.template,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self.arguments,
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is broken at line {error.lineno}: {error.message}"
            ) from error
        except TEMPLATE_FAILURES as error:
            raise DatasetError(f"the chat template fails: {error}") from error
        return tokens["input_ids"], tokens["assistant_masks"]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        chat = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"not JSON: {error}") from error
    if not isinstance(chat, dict):
        raise DatasetError(
            f"a chat is an object with messages, this is {type(chat).__name__} {str(chat)[:40]!r}"
        )
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f"no list of messages; the keys are {', '.join(chat) or 'none'}")
    for index, message in enumerate(messages, 1):
        _check_message(index, message)
    return chat


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DatasetError(f"message {index} has no role: {str(message)[:40]}")
    content = message.get("content")
    kinds = (
        [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    )
    if any(kind != "text" for kind in kinds):
        raise DatasetError(f"message {index} holds {', '.join(map(str, kinds))}; only text can be extracted")


@dataclass
class _Chats:
    """The good rows of a file, in order; counts and refusals stand when it was read to its end."""

    source: Path
    renderer: _Renderer
    sha256: Any = field(default_factory=hashlib.sha256)
    refused: dict[int, str] = field(default_factory=dict)
    num_lines: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_truncated: int = 0

    def __iter__(self) -> Iterator[_Row]:
        with self.source.open("rb") as lines:
            for self.num_lines, line in enumerate(lines, 1):
                self.sha256.update(line)
                if line.strip():
                    yield from self._rows(line)
        if not self.num_rows:
            first = next(iter(self.refused.values()), "all lines are empty")
            raise DatasetError(
                f"none of the {self.num_lines} lines of {self.source} is a usable chat: {first}"
            )

    def _rows(self, line: bytes) -> Iterator[_Row]:
        try:
            row = self.renderer.row(line, self.num_lines)
        except DatasetError as error:
            self.refused[self.num_lines] = f"line {self.num_lines}: {error}"
            return
        self.num_rows += 1
        self.num_tokens += len(row.input_ids)
        self.num_supervised += sum(row.loss_mask)
        self.num_truncated += row.is_truncated
        yield row


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name if all goes well and is gone otherwise."""
    folder = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    try:
        yield folder
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _write_rows(rows: _Chats, path: Path) -> None:
    pending: list[_Row] = []
    with pa.ipc.new_stream(str(path), SCHEMA) as writer:
        for row in rows:
            pending.append(row)
            if len(pending) == BATCH_ROWS:
                writer.write_batch(_record_batch(pending))
                pending = []
        if pending:
            writer.write_batch(_record_batch(pending))


def _record_batch(rows: list[_Row]) -> pa.RecordBatch:
    values = [{"input_ids": row.input_ids, "loss_mask": row.loss_mask, "id": row.row_id} for row in rows]
    return pa.RecordBatch.from_pylist(values, schema=SCHEMA)


def _write_metadata(folder: Path, provenance: dict[str, Any]) -> None:
    text = json.dumps(provenance, indent=2, sort_keys=True)
    state: dict[str, Any] = {
        "_data_files": [{"filename": DATA_FILE}],
        "_fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "provenance.json").write_text(text)
