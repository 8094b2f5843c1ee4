"""Stored states against a served model: real HTTP, a real model, right and wrong."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from layertap.cli import main
from layertap.coordinator import Run
from layertap.errors import EndpointError, FidelityError, SpecError
from layertap.fidelity import Fidelity, latest
from layertap.served import check_served
from layertap.store import Store
from layertap.target_files import TargetFiles
from tests.model_server import ModelServer, serving
from tests.models import saved, tiny_hybrid, tiny_llama
from tests.runs import run_lane, save_rows, settings_for, some_rows

MODELS = {"llama": tiny_llama, "hybrid": tiny_hybrid}


def make_root(folder: Path, model: Any, **changes: Any) -> Store:
    """A root with a version, extracted from the model."""
    dataset, target = save_rows(some_rows(12), folder / "tokens"), saved(model, folder / "target")
    store = Store.folder(folder / "root")
    run = Run.prepare(store, settings_for(dataset, target, **changes))
    assert run.plan is not None
    run_lane(store, run.plan.plan_id, target)
    run.publish()
    return store


@pytest.fixture(scope="module")
def llama_root(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_root(tmp_path_factory.mktemp("llama"), tiny_llama())


@pytest.fixture
def llama() -> Any:
    return tiny_llama()


@pytest.fixture
def right(llama: Any) -> Iterator[str]:
    """The address of a server of the model that the states are of."""
    with serving(ModelServer(model=llama)) as address:
        yield address


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def quantised(model: Any, bits: int) -> Any:
    """The model with its matrices rounded to so many bits, by the largest value of a row."""
    model = copy.deepcopy(model)
    for parameter in model.model.layers.parameters():
        if parameter.dim() == 2:
            step = parameter.data.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
            parameter.data = (parameter.data / step).round() * step
    return model


def with_plain_norm(model: Any) -> Any:
    """The model served with a final norm whose weight is left out."""
    model = copy.deepcopy(model)
    model.model.norm.weight.data.fill_(0.0 if "Qwen3_5" in type(model).__name__ else 1.0)
    return model


def other_checkpoint() -> Any:
    torch.manual_seed(1)
    model = tiny_llama()
    for parameter in model.model.layers[2].parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(
    ("kind", "last_hidden_state", "api"),
    [("llama", "post_norm", "vllm"), ("hybrid", "pre_norm", "sglang"), ("hybrid", "post_norm", "vllm")],
)
def test_the_states_of_the_served_model_agree(tmp_path: Path, kind: str, last_hidden_state: str, api: str):
    model = MODELS[kind]()
    store = make_root(tmp_path, model, last_hidden_state=last_hidden_state)
    with serving(ModelServer(model=model, api=api)) as address:
        found = check_served(store, address, num_rows=8)
    assert found.passed and found.agreement > 0.99
    assert found.mean_abs_logprob_difference < 1e-3
    assert (found.api, found.model, found.num_rows) == (api, "tiny", 8)


def test_both_apis_find_the_same(llama_root: Store, llama: Any, right: str):
    with serving(ModelServer(model=llama, api="sglang")) as address:
        found = [check_served(llama_root, url, num_rows=4) for url in (address, right)]
    assert [check.api for check in found] == ["sglang", "vllm"]
    assert found[0].agreement == found[1].agreement == 1
    first, second = (check.mean_abs_logprob_difference for check in found)
    assert first == pytest.approx(second)


def test_only_supervised_tokens_count(llama_root: Store, right: str):
    found = check_served(llama_root, right, num_rows=12)
    rows = some_rows(12)
    assert found.num_tokens == sum(sum(row["loss_mask"][1:]) for row in rows)
    assert found.num_rows == sum(any(row["loss_mask"][1:]) for row in rows)


@pytest.mark.parametrize(
    "wrong",
    [with_plain_norm, lambda _: other_checkpoint(), lambda model: quantised(model, 3)],
    ids=["another norm", "another checkpoint", "quantised weights"],
)
def test_another_model_than_the_served_one_fails_and_names_suspects(
    llama_root: Store, llama: Any, wrong: Any
):
    with serving(ModelServer(model=wrong(llama))) as address:
        result = invoke("check-served", llama_root.uri, "--endpoint", address)
    assert result.exit_code == 1
    for suspect in ("template: ", "norm: ", "checkpoint: ", "quantisation: ", "is below 0.95"):
        assert suspect in result.stderr


def test_weights_in_eight_bits_differ_but_pass(llama_root: Store, llama: Any):
    with serving(ModelServer(model=quantised(llama, 10))) as address:
        found = check_served(llama_root, address)
    assert found.passed and found.mean_abs_logprob_difference > 1e-3


def test_a_server_that_adds_tokens_is_told_from_the_prompt(llama_root: Store, llama: Any):
    for api in ("vllm", "sglang"):
        with (
            serving(ModelServer(model=llama, api=api, prefix=[1])) as address,
            pytest.raises(EndpointError, match="adds or drops some .a template, a token for the beginning"),
        ):
            check_served(llama_root, address)


def test_a_root_of_the_embedded_stack_is_found_by_its_folder(
    llama_root: Store, right: str, embedded: Callable[[str], list[str]], tmp_path: Path
):
    root = embedded(llama_root.uri)
    checked = invoke("check-served", *root, "--endpoint", right, "--rows", 2)
    assert checked.exit_code == 0 and "passed: " in checked.output, checked.output
    exported = invoke("export", *root, tmp_path / "out", "--to", "modelopt")
    assert exported.exit_code == 0 and "written: " in exported.output, exported.output


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_rows_that_are_too_long_for_the_server_are_left_out_and_counted(
    llama_root: Store, llama: Any, api: str
):
    """The first row is one of them."""
    rows = some_rows(12)
    fit = [row for row in rows if len(row["input_ids"]) < 41]
    assert rows[0] not in fit
    with serving(ModelServer(model=llama, api=api, context=41)) as address:
        result = invoke("check-served", llama_root.uri, "--endpoint", address)
    assert result.exit_code == 0, result.output
    found = latest(llama_root, 1)
    assert found is not None and (found.num_rows, found.num_too_long) == (len(fit), len(rows) - len(fit))
    assert found.num_tokens == sum(sum(row["loss_mask"][1:]) for row in fit)
    assert "; rows left out as too long for the server: 5 (http://127.0.0.1" in result.output
    assert "context" in found.refusal and found.refusal in result.output


@pytest.mark.parametrize(("context", "num_too_long"), [(3, 12), (20, 7)])
def test_a_server_that_takes_too_few_rows_is_refused_with_the_way_out(
    llama_root: Store, llama: Any, context: int, num_too_long: int
):
    before = latest(llama_root, 1)
    with (
        serving(ModelServer(model=llama, context=context)) as address,
        pytest.raises(
            EndpointError,
            match=rf"{num_too_long} of the rows .* half of them or more: serve a longer context .*--max-mod"
            rf".* answers 400: .*maximum context length is {context} tokens",
        ),
    ):
        check_served(llama_root, address)
    assert latest(llama_root, 1) == before


def test_another_refusal_than_of_a_length_ends_the_check(llama_root: Store, llama: Any):
    class OutOfVocabulary(ModelServer):
        def refusal(self, body: dict[str, Any]) -> dict[str, Any] | None:
            is_first = body.get("prompt") == some_rows(12)[0]["input_ids"]
            return {"error": {"message": "Token id 99 is out of vocabulary"}} if is_first else None

    with (
        serving(OutOfVocabulary(model=llama)) as address,
        pytest.raises(EndpointError, match=r"completions answers 400: .*out of vocabulary"),
    ):
        check_served(llama_root, address)


def test_every_check_is_recorded_and_status_shows_the_newest(tmp_path: Path):
    model = tiny_llama()
    store = make_root(tmp_path, model)
    assert latest(store, 1) is None
    assert "version 1, served fidelity: not checked\n" in invoke("status", tmp_path / "root").output
    with serving(ModelServer(model=with_plain_norm(model))) as address, pytest.raises(FidelityError):
        check_served(store, address)
    failed = latest(store, 1)
    assert failed is not None and not failed.passed
    assert f"served fidelity: {failed}\n" in invoke("status", tmp_path / "root").output
    with serving(ModelServer(model=model)) as address:
        found = check_served(store, address.replace("//", "//someone:secret@"))
    assert latest(store, 1) == found and found.endpoint == address
    assert f"served fidelity: {found}\n" in invoke("status", tmp_path / "root").output
    assert str(failed).startswith("FAILED: top-1 agreement 0.") and str(found).startswith("passed: top-1")
    values = asdict(found)
    del values["num_too_long"], values["refusal"]  # as before they were kept
    assert Fidelity.from_dict(values) == found
    records = [json.loads(store.get(f"versions/1.served-{k}.json")) for k in (1, 2)]
    assert [record["model"] for record in records] == ["tiny", "tiny"]
    assert "secret" not in json.dumps(records)


def test_the_model_is_named_where_there_are_several(llama_root: Store, llama: Any):
    with serving(ModelServer(model=llama, names=("base", "tuned"))) as address:
        with pytest.raises(EndpointError, match="serves base, tuned, which of them is meant: give --model"):
            check_served(llama_root, address)
        with pytest.raises(EndpointError, match="serves base, tuned, not 'other': give --model"):
            check_served(llama_root, address, model="other")
        assert check_served(llama_root, address, model="tuned").model == "tuned"


def test_a_key_comes_from_the_environment(llama_root: Store, llama: Any, monkeypatch: pytest.MonkeyPatch):
    with serving(ModelServer(model=llama, api_key="k-123")) as address:
        with pytest.raises(EndpointError, match="/v1/models answers 401"):
            check_served(llama_root, address)
        monkeypatch.setenv("OPENAI_API_KEY", "k-123")
        assert check_served(llama_root, f"{address}/v1/").passed


def test_servers_that_cannot_be_asked_are_named(llama_root: Store, llama: Any):
    with serving(ModelServer(model=llama)) as address:
        pass
    with pytest.raises(EndpointError, match="/v1/models doesn't answer"):
        check_served(llama_root, address)
    with pytest.raises(EndpointError, match="is no server's address such as http://host:8000/v1"):
        check_served(llama_root, "host")
    with (
        serving(ModelServer(model=llama, api="neither")) as address,
        pytest.raises(EndpointError, match="gives no log probabilities of a prompt by token id"),
    ):
        check_served(llama_root, address)


class _Short(ModelServer):
    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._generated(body)
        del answer["meta_info"]["input_top_logprobs"][-1]
        return answer


class _WithNull(ModelServer):
    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._generated(body)
        answer["meta_info"]["input_token_logprobs"][-1][0] = None
        return answer

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._completion(body)
        for by_id in answer["choices"][0].get("prompt_logprobs", [])[-1:]:
            by_id.update((k, {**v, "logprob": None}) for k, v in list(by_id.items()))
        return answer


@pytest.mark.parametrize(("server", "api"), [(_Short, "sglang"), (_WithNull, "sglang"), (_WithNull, "vllm")])
def test_an_answer_that_lacks_something_is_refused_and_not_recorded(
    llama_root: Store, llama: Any, server: Any, api: str
):
    before = latest(llama_root, 1)
    with (
        serving(server(model=llama, api=api)) as address,
        pytest.raises(EndpointError, match="in another form|of another form"),
    ):
        check_served(llama_root, address)
    assert latest(llama_root, 1) == before


@pytest.mark.parametrize(
    "config", [{"logit_scale": 0.06}, {"text_config": {"final_logit_softcapping": 30.0}, "logit_scale": 1}]
)
def test_a_target_that_changes_its_logits_is_refused(
    llama_root: Store, right: str, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
):
    monkeypatch.setattr(TargetFiles, "config", config)
    changed = {"final_logit_softcapping": 30.0} if "text_config" in config else config
    with pytest.raises(SpecError, match=f"changes its logits after the head, .*: {changed}$"):
        check_served(llama_root, right)


def test_a_root_without_last_states_is_refused(tmp_path: Path, right: str):
    store = make_root(tmp_path, tiny_llama(), last_hidden_state="none")
    with pytest.raises(SpecError, match="stores no last hidden state"):
        check_served(store, right)
