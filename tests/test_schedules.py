"""The schedule of docs/updates.md, on a real server: the runs it makes, and what an upgrade leaves of it."""

import json
import os
import re
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import get_current_settings

from deployments import bootstrap
from flows.again import reextract_when_changed
from flows.parameters import Reextraction

DOCS = bootstrap.PREFECT_FILE.parents[1] / "docs" / "updates.md"
DEPLOYMENT = "reextract_when_changed/reextract-when-changed"


def told_by_the_docs() -> Any:
    text = DOCS.read_text()
    assert f"/deployments/name/{DEPLOYMENT} " in text
    found = re.search(r"/deployments/ID/schedules --data '(.+?)'", text, re.DOTALL)
    assert found
    return json.loads(found[1])


def upgrade() -> None:
    bootstrap.make_pools()
    bootstrap.deploy({**os.environ, **get_current_settings().to_environment_variables(exclude_unset=True)})


@pytest.mark.usefixtures("prefect_server")
def test_a_schedule_for_a_root_makes_runs_that_the_flow_takes_and_outlives_an_upgrade() -> None:
    reextract_when_changed.to_deployment("reextract-when-changed").apply()
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(DEPLOYMENT)
        client.request("POST", f"/deployments/{deployment.id}/schedules", json=told_by_the_docs())
        upgrade()
        (schedule,) = client.read_deployment(deployment.id).schedules
        client.request("POST", f"/deployments/{deployment.id}/schedule", json={"max_runs": 3})
        runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment.id]
    assert schedule.active and len(runs) == 3
    for run in runs:
        assert run.state is not None and run.state.is_scheduled()
        (form,) = reextract_when_changed.validate_parameters(run.parameters).values()
        assert form == Reextraction(root="MODEL/CHATS")
