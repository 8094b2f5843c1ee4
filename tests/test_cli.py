"""The `layertap` command as a user meets it."""

import json
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from datasets import Dataset

import layertap.cli
import layertap.store_check
from layertap.cli import main
from layertap.coordinator import Run
from layertap.errors import InputError, StoreError
from layertap.object_server import ObjectServer
from layertap.store import Store
from layertap.store_check import BRIEF
from tests.models import VOCAB_SIZE, saved, tiny_llama
from tests.runs import run_lane, settings_for


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_llama(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six rows: one is empty, one has an id beyond the embedding, two are equal, one is longer than 8."""
    rows = [[1, 2, 3], [], [4, VOCAB_SIZE], [1, 2, 3], [5] * 12, [6, 7]]
    folder = tmp_path_factory.mktemp("tokens")
    Dataset.from_dict({"input_ids": rows}).save_to_disk(folder)
    return folder


def values(output: str) -> dict[str, str]:
    """The table of `plan` by its first column."""
    pairs = [line.strip().split("  ", 1) for line in output.splitlines() if "  " in line.strip()]
    return {name: value.strip() for name, value in pairs}


def test_help_lists_every_command_and_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from layertap.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('heavy:', [m for m in ('prefect', 'torch', 'transformers') if m in sys.modules])\n"
    )
    shown = python(code).stdout
    commands = (
        "prepare",
        "plan",
        "status",
        "inspect",
        "verify",
        "void",
        "up",
        "down",
        "workers",
        "run",
        "failures",
    )
    for command in commands:
        assert f"\n  {command} " in shown
    assert "heavy: []" in shown
    assert "Not available" not in shown


def test_plan_needs_no_prefect(target: str, tokens: Path):
    arguments = ["plan", str(tokens), "--target", target, "--layers", "1", "--max-length", "8"]
    code = f"import sys; sys.modules['prefect'] = None\nfrom layertap.cli import main\nmain({arguments!r})"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "rows to extract" in done.stdout


def test_a_command_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch):
    broken = EntryPoint(name="broken", value="no_such_module:command", group=layertap.cli.COMMANDS_GROUP)

    class Found(list[EntryPoint]):
        names = {"broken"}

    monkeypatch.setattr(layertap.cli, "entry_points", lambda **_: Found([broken]))
    assert "Not available: No module named 'no_such_module'" in invoke("--help").output
    result = invoke("broken")
    assert (result.exit_code, result.stderr) == (
        1,
        "Error: Not available: No module named 'no_such_module'\n",
    )


@pytest.mark.parametrize(("error", "code"), [(InputError("bad value 3"), 2), (StoreError("no answer"), 1)])
def test_errors_raised_on_purpose_are_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, target: str, tokens: Path, error: Exception, code: int
):
    import layertap.coordinator

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(layertap.coordinator.Preview, "make", fail)
    result = invoke("plan", tokens, "--target", target, "--layers", "1")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"Error: {error}\n")


def test_plan_counts_every_row_and_names_the_refused_ones(target: str, tokens: Path):
    result = invoke("plan", tokens, "--target", target, "--layers", "0,3", "--max-length", "8")
    assert result.exit_code == 0, result.output
    table = values(result.stdout)
    assert table["rows in the dataset"] == "6"
    assert table["rows refused"] == "2"
    assert table["rows truncated"] == "1 to 8 tokens"
    assert table["rows stored already, or equal to another"] == "1"
    assert table["rows to extract"] == "3"
    assert table["tokens to extract"] == str(3 + 8 + 2)
    refused = [line for line in result.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 2
    assert "row 1: " in refused[0] and "row 2: " in refused[1] and str(VOCAB_SIZE) in refused[1]


def test_plan_cuts_the_list_of_refused_rows(target: str, tmp_path: Path):
    Dataset.from_dict({"input_ids": [[1]] + [[VOCAB_SIZE + k] for k in range(25)]}).save_to_disk(tmp_path)
    shown = invoke("plan", tmp_path, "--target", target, "--layers", "1").stdout
    assert shown.count("refused: ") == 10
    assert "… and 15 more" in shown


def test_plan_without_last_state_names_the_trainers_it_excludes(target: str, tokens: Path):
    arguments = ["plan", tokens, "--target", target, "--layers", "1"]
    assert "speculators" in invoke(*arguments, "--last-hidden-state", "none").stdout
    assert "speculators" not in invoke(*arguments).stdout


def test_layers_come_from_a_drafter(target: str, tokens: Path, tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"target_layer_ids": [0, 2]}))
    result = invoke("plan", tokens, "--target", target, "--drafter", config)
    assert values(result.stdout)["layers (0-based outputs)"] == "0, 2"


@pytest.mark.parametrize("layers", [[], ["--layers", "1", "--drafter", __file__]])
def test_layers_are_given_in_one_way(target: str, tokens: Path, layers: list[str]):
    result = invoke("plan", tokens, "--target", target, *layers)
    assert result.exit_code == 2
    assert "give either --layers, such as --layers 1,16,31, or --drafter" in result.stderr


def test_bad_layers_are_named_with_the_valid_range(target: str, tokens: Path):
    text = invoke("plan", tokens, "--target", target, "--layers", "one")
    assert text.exit_code == 2 and "'one' is not a list of layer ids such as 1,16,31" in text.stderr
    negative = invoke("plan", tokens, "--target", target, "--layers", "-1,2")
    assert negative.exit_code == 2 and "they count from 0" in negative.stderr
    beyond = invoke("plan", tokens, "--target", target, "--layers", "1,4")
    assert beyond.exit_code == 2
    assert "layer ids [4] are out of range: this target has decoder layers 0 to 3" in beyond.stderr


def test_prepare_passes_template_arguments_as_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import layertap.prepare

    given = {}

    def remember(source: Path, out: Path, **options: object) -> layertap.prepare.Prepared:
        given.update(options)
        counts = {"num_rows": 3, "num_tokens": 40, "num_supervised": 20, "num_truncated": 1}
        return layertap.prepare.Prepared(path=out, refused={2: "line 2: no"}, provenance={}, **counts)

    monkeypatch.setattr(layertap.prepare, "prepare_chats", remember)
    (tmp_path / "chats.jsonl").touch()
    arguments = ["--template-argument", "enable_thinking=false", "--template-argument", "name=Ann"]
    result = invoke("prepare", tmp_path / "chats.jsonl", tmp_path / "out", "--tokenizer", "x", *arguments)
    assert given["template_arguments"] == {"enable_thinking": False, "name": "Ann"}
    assert "3 rows in" in result.stdout and "1 lines refused" in result.stdout
    assert "refused: line 2: no" in result.stdout


def test_status_of_a_folder_that_is_no_root(tmp_path: Path):
    result = invoke("status", tmp_path)
    assert result.exit_code == 1
    assert "holds no extraction: there is no layertap.json" in result.stderr


def test_status_says_in_one_sentence_that_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layertap.store_check, "BRIEF", {**BRIEF, "retry_timeout": timedelta(milliseconds=1)})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    result = invoke("status", "s3://bucket/states")
    assert result.exit_code == 1
    (told,) = result.stderr.splitlines()
    assert told.startswith("Error: the store doesn't answer: can't get s3://bucket/states/layertap.json: ")
    assert told.endswith("and go on when it does: see that it is up and lets this host in, then ask again")


def test_status_shows_plans_shards_and_versions(target: str, tokens: Path, tmp_path: Path):
    settings = settings_for(str(tokens), target, max_length=8, max_refused_share=0.5)
    run = Run.prepare(Store.folder(tmp_path / "root"), settings)
    assert run.plan is not None
    waiting = invoke("status", tmp_path / "root").stdout
    assert run.plan.plan_id in waiting and "1 waiting" in waiting and "0.0%" in waiting

    run_lane(run.catalog.store, run.plan.plan_id, target)
    run.publish()
    done = [line.split() for line in invoke("status", tmp_path / "root").stdout.splitlines()]
    assert [run.plan.plan_id, "3", "13", "100.0%", "1", "committed"] in done
    assert ["1", "6", "4", "16", "yes"] in [line[:5] for line in done]
    shards = invoke("status", tmp_path / "root", "--plan", run.plan.plan_id).stdout.splitlines()
    assert ["0", "committed", "1", "0", "3", "of", "3", "13", "of", "13"] in [s.split()[:10] for s in shards]


def test_status_does_not_wait_for_torch(target: str, tokens: Path, tmp_path: Path):
    run = Run.prepare(
        Store.folder(tmp_path / "root"), settings_for(str(tokens), target, max_refused_share=1.0)
    )
    assert run.plan is not None
    run_lane(run.catalog.store, run.plan.plan_id, target)
    arguments = ["status", str(tmp_path / "root"), "--plan", run.plan.plan_id]
    for shown in (arguments, arguments[:2]):
        done = python(
            f"import sys; sys.modules['torch'] = None; from layertap.cli import main; main({shown!r})"
        )
        assert done.returncode == 0, done.stderr


def test_inspect_shows_a_batch_a_shard_and_a_version(target: str, tokens: Path, tmp_path: Path):
    root = tmp_path / "root"
    settings = settings_for(str(tokens), target, max_length=8, max_refused_share=0.5)
    run = Run.prepare(Store.folder(root), settings)
    assert run.plan is not None
    run_lane(run.catalog.store, run.plan.plan_id, target)
    run.publish()

    version = values(invoke("inspect", root, "--version", 1).stdout)
    assert version["missing"] == "2 rows" and "row 1" in version["row 1"]
    shard = invoke("inspect", root, "--plan", run.plan.plan_id).stdout
    assert "committed: claim-1, outcome" in shard and "lane-0" in shard
    (batch,) = root.rglob("batch-00000.safetensors")
    shown = invoke("inspect", batch).stdout
    assert "whole" in shown and values(shown)["rows"] == "3" and "input_ids I32[8]" in shown
    batch.write_bytes(batch.read_bytes()[:-5])
    assert "DAMAGED" in invoke("inspect", batch).stdout
    batch.write_text("no safetensors file but a text")
    text = invoke("inspect", batch)
    assert text.exit_code == 1 and "bytes doesn't fit into its 30" in text.stderr
    beyond = invoke("inspect", root, "--plan", run.plan.plan_id, "--shard", 99)
    assert beyond.exit_code == 2 and "has no shard 99; its shards are 0 to 0" in beyond.stderr
    nothing = invoke("inspect", root)
    assert nothing.exit_code == 2 and "say what to show" in nothing.stderr
    unknown = invoke("status", root, "--plan", "abc")
    assert unknown.exit_code == 2 and f"no plan 'abc'; plans there: {run.plan.plan_id}" in unknown.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("status", "{root}"),
        ("verify", "{root}"),
        ("void", "{root}", "plan", "0"),
        ("gc", "{root}"),
        ("prune", "{root}", "--keep-versions", "1"),
    ],
)
def test_a_root_of_the_embedded_stack_is_reached_by_its_folder(
    object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "objects").symlink_to(object_server.folder)
    arguments = [word.format(root="s3://layertap-tests/nothing-here") for word in command]
    found = invoke(*arguments, "--state", tmp_path)
    assert "s3://layertap-tests/nothing-here holds no extraction" in found.stderr
    stopped = invoke(*arguments, "--state", tmp_path / "other")
    assert stopped.exit_code == 2 and "no object server runs from" in stopped.stderr


def test_plan_leaves_out_what_a_root_holds(target: str, tokens: Path, tmp_path: Path):
    settings = settings_for(str(tokens), target, layer_ids=(1,), max_length=8, max_refused_share=0.5)
    run = Run.prepare(Store.folder(tmp_path / "root"), settings)
    assert run.plan is not None
    run_lane(run.catalog.store, run.plan.plan_id, target)
    arguments = ["plan", tokens, "--target", target, "--max-length", "8", "--dtype", "float32"]
    table = values(invoke(*arguments, "--layers", "1", "--root", tmp_path / "root").stdout)
    assert table["rows to extract"] == "0"
    other = invoke(*arguments, "--layers", "2", "--root", tmp_path / "root")
    assert other.exit_code == 1 and "belongs to another extraction" in other.stderr


def test_fetch_target_checks_a_folder_and_names_what_the_hub_refuses(target: str):
    assert "is on this host: 4 layers of 64" in invoke("fetch-target", target).stdout
    unknown = invoke("fetch-target", "no-such-org/no-such-model")
    assert unknown.exit_code == 2 and "target 'no-such-org/no-such-model' can't be fetched" in unknown.stderr
