"""Deployments load, forms refuse bad values by name, and every form becomes the settings it says."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import build_error_obj, validate
from pydantic import ValidationError

from deployments.automations import ENDS, FLOWS
from deployments.bootstrap import PREFECT_FILE
from flows import again
from flows import extract as extract_flow
from flows import lane as lane_flow
from flows.dispatch import STORE_FAILED
from flows.extract import extract_hidden_states
from flows.parameters import Advanced, Extraction, Preparation, Reextraction, Retry, Verification
from layertap.coordinator import Run
from layertap.errors import InputError, StoppedError
from layertap.store import Store
from tests.models import saved, tiny_llama
from tests.runs import save_rows, settings_for, some_rows

DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(PREFECT_FILE.read_text())["deployments"]

FORM: dict[str, Any] = {"target": "org/model", "dataset": "rows", "root": "model/run-1", "layer_ids": [1, 3]}

FORMS = (Extraction, Advanced, Preparation, Retry, Reextraction, Verification)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["entrypoint"])
def test_every_deployment_loads(deployment: dict[str, Any]) -> None:
    flow = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    assert flow.name == deployment["entrypoint"].rsplit(".", 1)[-1]
    assert flow.description


def test_flows_have_the_promised_names() -> None:
    names = {deployment["entrypoint"].rsplit(".", 1)[-1] for deployment in DEPLOYMENTS}
    assert names == {
        "cancel_extraction",
        "extract_hidden_states",
        "extraction_lane",
        "prepare_dataset",
        "reextract_when_changed",
        "retry_failed_shards",
        "verify",
    }
    assert [d["name"].replace("-", "_") for d in DEPLOYMENTS] == [
        d["entrypoint"].rsplit(".", 1)[-1] for d in DEPLOYMENTS
    ]


def test_lanes_go_to_the_gpu_pool_and_all_else_to_the_control_pool() -> None:
    pools = {d["entrypoint"].rsplit(".", 1)[-1]: d["work_pool"]["name"] for d in DEPLOYMENTS}
    assert pools.pop("extraction_lane") == "layertap-gpu"
    assert set(pools.values()) == {"layertap-control"}


def test_every_flow_is_declared_dead_when_it_is_silent_and_not_once_it_has_ended() -> None:
    names = {deployment["entrypoint"].rsplit(".", 1)[-1] for deployment in DEPLOYMENTS}
    assert set(FLOWS) == names
    assert {f"prefect.flow-run.{state}" for state in (STORE_FAILED, "Skipped", "Completed")} <= set(ENDS)


BAD_VALUES = [
    ("layer_ids", [-1]),
    ("layer_ids", []),
    ("root", "/absolute"),
    ("root", "a/../b"),
    ("root", ""),
    ("storage", "layertap"),
    ("storage", "gcs-bucket/layertap"),
    ("last_hidden_state", "both"),
    ("max_length", 0),
    ("num_lanes", 0),
    ("target", ""),
]

BAD_ADVANCED = [("dtype", "int8"), ("max_refused_share", 1.5), ("shard_tokens", 0), ("id_column", "")]


@pytest.mark.parametrize(
    ("field", "value"),
    [*BAD_VALUES, *BAD_ADVANCED, ("layer_ids", [3, 1]), ("layer_ids", [1, 1]), ("layers", [1])],
)
def test_a_bad_value_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        Extraction.of({**FORM, field: value})


@pytest.mark.parametrize(("field", "value"), [*BAD_VALUES, *BAD_ADVANCED, ("drafter", "given too")])
def test_the_form_itself_refuses_a_bad_value_before_a_run_starts(field: str, value: Any) -> None:
    """As Prefect's server and both UIs check it: against the deployment's JSON schema."""
    schema = parameter_schema(extract_hidden_states).model_dump_for_openapi()
    form = {**FORM, "advanced": {field: value}} if (field, value) in BAD_ADVANCED else {**FORM, field: value}
    errors = str(build_error_obj(validate({"extraction": form}, schema)))
    assert f"'property': '{'layer_ids' if field == 'drafter' else field}'" in errors
    assert not validate({"extraction": FORM}, schema)
    assert not validate({"extraction": {**FORM, "layer_ids": [], "drafter": "there"}}, schema)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_shows_its_fields_in_their_order_whatever_the_server_s_database_does_to_it(form: Any) -> None:
    properties = form.model_json_schema()["properties"]
    positions = {name: field["position"] for name, field in properties.items()}
    assert sorted(positions, key=lambda name: positions[name]) == list(form.model_fields)


def test_the_advanced_group_is_folded_away_until_it_is_asked_for() -> None:
    advanced = Extraction.model_json_schema()["properties"]["advanced"]
    assert advanced["default"] is None
    assert advanced["anyOf"][0] == {"type": "null", "title": "as usual"}
    assert Extraction.of(FORM).settings() == Extraction.model_validate(FORM).settings()


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        InputError, match="no shard_token; it has check_space, compiled, dataset, .*shard_tokens"
    ):
        Extraction.of({**FORM, "shard_token": 3})


def test_runs_are_named_by_root_and_dataset() -> None:
    extraction = Extraction.of({**FORM, "dataset": "/data/chats/"})
    assert extraction.run_name == "model/run-1 from chats"
    assert extraction.tags == ["root:model/run-1", "dataset:chats", "target:model"]


def test_layers_come_from_a_list_or_a_drafter_but_not_both() -> None:
    with pytest.raises(ValidationError, match="layer_ids.*drafter"):
        Extraction.model_validate({**FORM, "drafter": "drafter"})


def test_the_form_becomes_the_settings_it_says() -> None:
    settings = Extraction.of(
        {**FORM, "split": "train", "id_column": "uid", "shard_tokens": 10, "max_refused_share": 0.5}
    ).settings()
    assert (settings.layer_ids, settings.split, settings.revision) == ((1, 3), "train", None)
    assert (settings.columns.row_id, settings.plan.shard_tokens, settings.max_refused_share) == (
        "uid",
        10,
        0.5,
    )


def test_forms_have_a_description_for_every_field() -> None:
    for form in FORMS:
        missing = [name for name, field in form.model_fields.items() if not field.description]
        assert not missing


def test_a_root_that_is_no_folder_is_answered_with_an_example() -> None:
    with pytest.raises(InputError, match="root '/absolute' is not like qwen3-8b/chats"):
        Extraction.of({**FORM, "root": "/absolute"})


def test_a_dataset_is_not_prepared_into_a_folder_that_goes_with_the_run() -> None:
    form = {"source": "/data/chats.jsonl", "out": "tokens", "tokenizer": "org/model"}
    with pytest.raises(InputError, match="out 'tokens' is not like /data/tokens"):
        Preparation.checked(form)


@pytest.mark.parametrize("run_count", [1, 2])
def test_a_lane_of_a_run_that_was_stopped_is_cancelled_and_says_how_to_go_on_also_when_it_is_retried(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_count: int
) -> None:
    target = saved(tiny_llama(), tmp_path / "target")
    run = Run.prepare(folder_store, settings_for(save_rows(some_rows(20), tmp_path / "rows"), target))
    assert run.plan is not None
    run.stop()
    monkeypatch.setattr(lane_flow, "load_block", lambda storage: None)
    monkeypatch.setattr(lane_flow, "store_in", lambda block, root: folder_store)
    monkeypatch.setitem(lane_flow.runtime.flow_run.FIELDS, "run_count", lambda: run_count)
    state = lane_flow.extraction_lane.fn("s", "r", run.plan.plan_id, run.run_id, "no target", "lane-0")
    assert state.is_cancelled()
    told = f"run {run.run_id} was told to stop; to go on, press Retry on the run's coordinator"
    assert told in str(state.message) and folder_store.uri in str(state.message)


def test_every_coordinator_that_was_told_to_stop_ends_as_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise StoppedError("run 1 was told to stop")

    form = Extraction.model_validate(FORM)
    monkeypatch.setattr(extract_flow, "extract", stopped)
    monkeypatch.setattr(again, "_last", lambda _: form)
    monkeypatch.setattr(again, "_up_to_date", lambda _: None)
    monkeypatch.setattr(again, "wait_for_turn", lambda _: True)
    monkeypatch.setattr(again, "_wait_until_still", lambda *_: ())
    ends = [
        extract_hidden_states.fn(form),
        again.retry_failed_shards.fn(Retry(root="model/run-1")),
        again.reextract_when_changed.fn(Reextraction(root="model/run-1")),
    ]
    assert [(end.is_cancelled(), end.message) for end in ends] == [(True, "run 1 was told to stop")] * 3
