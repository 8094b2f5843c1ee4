"""What `infra/` promises: a policy that allows what layertap asks for and no more, services, units."""

import configparser
import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from click.testing import CliRunner

from deployments import bootstrap
from deployments.workers import GRACE_S, SUBMIT_S
from layertap.cli import main
from layertap.dataset_files import StoredDataset
from layertap.object_server import ObjectServer
from layertap.store import PART_BYTES, Store
from tests.conftest import BUCKET
from tests.proxy import Proxy

INFRA = Path(bootstrap.__file__).parents[1] / "infra"
COMPOSE: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text())
UNITS = sorted((INFRA / "systemd").glob("*.service"))
STOP_S = 2 * GRACE_S + SUBMIT_S
"""Seconds that the supervisor takes at most: first its engines end, then its workers."""


class Asked(NamedTuple):
    """What AWS checks of a request."""

    action: str
    resource: str
    prefix: str | None = None


ACTIONS = [
    (r"GET /[^/]+\?.*list-type=2", "ListBucket"),
    (r"GET /[^/]+\?.*uploads", "ListBucketMultipartUploads"),
    (r"(GET|HEAD) /[^/]+/", "GetObject"),
    (r"DELETE .*\?uploadId=", "AbortMultipartUpload"),
    (r"DELETE /[^/]+/|POST /[^/]+\?delete", "DeleteObject"),
    (r"(PUT|POST) /[^/]+/", "PutObject"),
]


def asked(request: str) -> Asked:
    action = next(name for pattern, name in ACTIONS if re.match(pattern, request))
    parts = urlsplit(request.partition(" ")[2])
    prefix = parse_qs(parts.query).get("prefix", [None])[0] if action.startswith("List") else None
    path = parts.path if action.startswith("List") or parts.path.count("/") > 1 else f"{parts.path}/PREFIX/a"
    return Asked(f"s3:{action}", f"arn:aws:s3::{path.replace('/', ':', 1)}", prefix)


def statements() -> list[dict[str, Any]]:
    text = (INFRA / "bucket-policy.json").read_text().replace("BUCKET", BUCKET)
    found: list[dict[str, Any]] = json.loads(text)["Statement"]
    return found


def many(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def allows(statement: dict[str, Any], what: Asked) -> bool:
    prefixes = statement.get("Condition", {"StringLike": {"s3:prefix": "*"}})["StringLike"]["s3:prefix"]
    return (
        what.action in many(statement["Action"])
        and fnmatch.fnmatchcase(what.resource, statement["Resource"])
        and any(fnmatch.fnmatchcase(what.prefix or "", pattern) for pattern in many(prefixes))
    )


@pytest.fixture
def proxy(object_server: ObjectServer) -> Iterator[Proxy]:
    with Proxy(object_server.ports.s3).running() as proxy:
        yield proxy


def use_all_of(store: Store) -> None:
    """Every kind of request that a store makes."""
    assert not store.exists("layertap.json")
    store.put("data/a", b"small", durable=True)
    store.put_chunks("data/b", lambda: iter([bytes(PART_BYTES), b"more"]))
    store.create("data/c", b"once")
    assert (store.get("data/a"), bytes(store.get_range("data/b", 0, 2))) == (b"small", b"\0\0")
    assert (store.names("data"), store.folders("data"), len(store.list("data"))) == (["a", "b", "c"], [], 3)
    bucket: Any = store._root
    key = f"{bucket.settings.prefix}/data/d"
    bucket._client_of_process().create_multipart_upload(Bucket=BUCKET, Key=key)
    for upload in store.open_uploads():
        store.abort(upload)
    store.delete(["data/a"])
    store.delete(["data/b", "data/c"])


def test_the_policy_allows_what_a_root_and_a_dataset_ask_of_a_bucket_and_no_more(
    object_server: ObjectServer, proxy: Proxy, tmp_path: Path
) -> None:
    def at(prefix: str) -> Store:
        settings = object_server.settings(BUCKET, prefix=prefix)
        settings = dataclasses.replace(settings, endpoint_url=proxy.endpoint_url)
        return Store.s3(settings, object_server.session())

    Store.s3(object_server.settings(BUCKET, prefix="DATASETS/rows"), object_server.session()).put("a", b"1")
    use_all_of(at("PREFIX/root"))
    StoredDataset(at("DATASETS"), "rows").stage(tmp_path)
    requests = {asked(request) for request in proxy.requests}
    assert not [one for one in requests if not any(allows(statement, one) for statement in statements())]
    for statement in statements():
        used = {one.action for one in requests if allows(statement, one)}
        assert used == set(many(statement["Action"])), statement["Sid"]


@pytest.mark.parametrize("action", ["ListBucket", "ListBucketMultipartUploads"])
@pytest.mark.parametrize("prefix", [None, "", "PRE", "PREFIX", "PREFIX-of-others/", "others/"])
def test_nothing_beside_the_prefix_is_listed(action: str, prefix: str | None) -> None:
    one = Asked(f"s3:{action}", f"arn:aws:s3:::{BUCKET}", prefix)
    assert not any(allows(statement, one) for statement in statements())


@pytest.mark.parametrize("action", ["GetObject", "PutObject", "DeleteObject"])
@pytest.mark.parametrize("key", ["others/a", "PREFIX-of-others/a"])
def test_nothing_beside_the_prefix_is_read_or_written(action: str, key: str) -> None:
    one = Asked(f"s3:{action}", f"arn:aws:s3:::{BUCKET}/{key}")
    assert not any(allows(statement, one) for statement in statements())


def test_uploads_are_aborted_under_the_prefix_alone() -> None:
    (rule,) = json.loads((INFRA / "bucket-lifecycle.json").read_text())["Rules"]
    assert (rule["Status"], rule["Filter"]) == ("Enabled", {"Prefix": "PREFIX/"})
    assert set(rule) == {"ID", "Status", "Filter", "AbortIncompleteMultipartUpload"}


def assert_is_a_command(line: str) -> None:
    told = CliRunner().invoke(main, [*line.split()[1:], "--help"])
    assert told.exit_code == 0, told.output


def test_services_are_pinned_and_run_what_there_is() -> None:
    targets = re.findall(r"^FROM \S+ AS (\w+)", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    for service in COMPOSE["services"].values():
        if "build" in service:
            assert service["build"]["target"] in targets
        else:
            assert re.search(r":\d[\w.-]*$", service["image"])
        assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])
    assert set(COMPOSE["services"]) == {"postgres", "server", "objects", "bootstrap", "control"}
    assert COMPOSE["services"]["bootstrap"]["command"] == f"python -m {bootstrap.__name__}"
    assert_is_a_command(COMPOSE["services"]["control"]["command"])


def test_the_service_of_coordinators_is_given_the_time_that_it_needs_to_stop() -> None:
    minutes = COMPOSE["services"]["control"]["stop_grace_period"]
    assert float(minutes.removesuffix("m")) * 60 > STOP_S


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_run_what_there_is_and_stop_engines_before_workers(path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    service = unit["Service"]
    assert_is_a_command(service["ExecStart"])
    # systemd stops in the order opposite to After: the network is there until the server was told of the end
    assert "network-online.target" in unit["Unit"]["After"].split()
    assert (service["KillMode"], service["Restart"]) == ("mixed", "always")
    assert float(service["TimeoutStopSec"]) > STOP_S
