"""Storage blocks: their client parameters reach the store, their credentials refresh."""

import logging
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import httpx
import pytest
from botocore.credentials import RefreshableCredentials
from prefect.client.base import PrefectHttpxSyncClient
from prefect_aws import AwsCredentials, S3Bucket
from prefect_aws.client_parameters import AwsClientParameters
from pydantic import SecretStr

from deployments.bootstrap import save_s3_block
from layertap import s3
from layertap.errors import InputError, StoreError
from layertap.object_server import ObjectServer
from layertap.retries import PATIENT
from layertap.store import S3Settings
from tasks.results import ShardResults
from tasks.storage import (
    boto3_session,
    dataset_files,
    load_block,
    local_dataset,
    open_store,
    s3_settings,
    store_in,
)
from tests.conftest import BUCKET
from tests.proxy import Proxy


def bucket(*, folder: str = "", **parameters: Any) -> S3Bucket:
    credentials = AwsCredentials(
        aws_access_key_id="key",
        aws_secret_access_key=SecretStr("secret"),
        region_name="eu-west-1",
        aws_client_parameters=AwsClientParameters(**parameters),
    )
    return S3Bucket(bucket_name="bucket", bucket_folder=folder, credentials=credentials)


def test_a_plain_block_is_aws_with_checksums_in_virtual_hosted_style() -> None:
    assert s3_settings(bucket(), "bucket", "root") == S3Settings(
        bucket="bucket", prefix="root", region="eu-west-1", path_style=False
    )


def test_what_the_client_parameters_say_reaches_the_store(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.touch()
    block = bucket(
        endpoint_url="https://store:9000",
        verify_cert_path=ca_file,
        config={"request_checksum_calculation": "when_required"},
    )
    assert s3_settings(block, "bucket", "model/run") == S3Settings(
        bucket="bucket",
        prefix="model/run",
        endpoint_url="https://store:9000",
        region="eu-west-1",
        path_style=True,
        verify=str(ca_file),
        checksums=False,
    )


@pytest.mark.parametrize(
    ("name", "endpoint_url", "style", "path_style"),
    [
        ("bucket", None, "path", True),
        ("bucket", "https://store", "virtual", False),
        ("dotted.bucket", None, "auto", True),
    ],
)
def test_addressing_style(name: str, endpoint_url: str | None, style: str, path_style: bool) -> None:
    """It is that of the bucket that is asked for: a dataset's may be another than the block's."""
    block = bucket(endpoint_url=endpoint_url, config={"s3": {"addressing_style": style}})
    assert s3_settings(block, name, "root").path_style is path_style


@pytest.mark.parametrize(("folder", "place"), [("", "model/run"), ("/team/", "team/model/run")])
def test_a_root_lies_in_the_folder_of_its_block(folder: str, place: str) -> None:
    assert store_in(bucket(folder=folder), "model/run").uri == f"s3://bucket/{place}"


@pytest.mark.parametrize("dataset", ["s3://bucket", "s3://bucket/", "s3://"])
def test_a_whole_bucket_is_no_dataset(dataset: str) -> None:
    for look in (dataset_files, local_dataset):
        with pytest.raises(InputError, match=f"'{dataset}' names no part of a bucket: give s3://bucket/pref"):
            look("s3-bucket/storage", dataset)


def test_certificates_may_be_left_unchecked() -> None:
    assert s3_settings(bucket(verify=False), "bucket", "root").verify is False


def test_the_session_has_the_blocks_keys_and_an_assumed_roles_refresh() -> None:
    credentials = bucket().credentials
    keys = boto3_session(credentials).get_credentials()
    assert keys is not None
    assert (keys.access_key, keys.secret_key) == ("key", "secret")

    role = AwsCredentials(assume_role_arn="arn:aws:iam::123456789012:role/lane", region_name="eu-west-1")
    assert isinstance(boto3_session(role).get_credentials(), RefreshableCredentials)


@pytest.fixture
def proxy(object_server: ObjectServer) -> Iterator[Proxy]:
    with Proxy(object_server.ports.s3).running() as proxy:
        yield proxy


SaveBlock = Callable[..., str]


@pytest.fixture
def save_block(object_server: ObjectServer, proxy: Proxy, prefect_server: None) -> SaveBlock:
    """Saves the block of a bucket behind the proxy, over what it was; with the server's keys, or others."""
    keys: Any = object_server.session().get_credentials()

    def save(access_key: str = keys.access_key, secret_key: str = keys.secret_key) -> str:
        options = {"endpoint_url": proxy.endpoint_url, "region": "us-east-1"}
        return save_s3_block(
            "replaced", bucket=BUCKET, access_key=access_key, secret_key=secret_key, **options
        )

    return save


@pytest.fixture
def root() -> str:
    return f"root-{uuid.uuid4().hex[:8]}"


def soon(seconds: float) -> Any:
    """Retries that end soon."""
    return {**PATIENT, "retry_timeout": timedelta(seconds=seconds)}


@pytest.mark.parametrize("expired", [True, False])
def test_keys_that_are_replaced_in_the_block_reach_a_store_that_is_open(
    save_block: SaveBlock, proxy: Proxy, root: str, expired: bool
) -> None:
    """The old ones have expired, or are known no more."""
    store = open_store(save_block("old", "old"), root).with_retry(soon(5))
    proxy.faults.expired_keys = {"old"} if expired else set()
    save_block()
    store.put("data/a", b"x", durable=True)
    assert store.get("data/a") == b"x"


class RefusingRoles(BaseHTTPRequestHandler):
    """Gives nobody a role, and notes who asked; in place of AWS's STS."""

    code: str
    asked: list[str]

    def do_POST(self) -> None:
        self.asked.append(self.headers["Authorization"].partition("Credential=")[2].partition("/")[0])
        body = f"<ErrorResponse><Error><Code>{self.code}</Code></Error></ErrorResponse>".encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidClientTokenId"])
def test_a_role_is_asked_for_with_the_keys_that_the_block_has_by_then(
    prefect_server: None, root: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Roles(RefusingRoles):
        asked: ClassVar[list[str]] = []

    Roles.code = code
    server = ThreadingHTTPServer(("127.0.0.1", 0), Roles)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{server.server_port}")
    role = {"assume_role_arn": "arn:aws:iam::123456789012:role/lane", "region_name": "eu-west-1"}

    def save(key: str) -> None:
        keys = AwsCredentials(aws_access_key_id=key, aws_secret_access_key=SecretStr("secret"), **role)
        keys.save("role", overwrite=True)
        S3Bucket(bucket_name="bucket", credentials=keys).save("role", overwrite=True)

    save("old")
    store = open_store("s3-bucket/role", root).with_retry(soon(0.5))
    save("new")
    with pytest.raises(StoreError, match=code):
        store.put("data/a", b"x")
    server.shutdown()
    assert (Roles.asked[0], Roles.asked[-1]) == ("old", "new")


def test_prefect_s_results_are_written_with_the_keys_of_then_and_read_through_the_block(
    save_block: SaveBlock, root: str
) -> None:
    block = load_block(save_block("old", "old"))
    results = ShardResults.of(block, store_in(block, root), root)
    reference = save_block()
    results.write_path(f"{root}/results/1.json", b"{}")
    assert results.read_path(f"{root}/results/1.json") == b"{}"
    now: Any = load_block(reference)
    assert now.read_path(f"{root}/results/1.json") == b"{}"


def test_a_block_that_can_not_be_loaded_changes_nothing_and_that_is_said(
    save_block: SaveBlock,
    proxy: Proxy,
    root: str,
    object_server: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(*_: Any, **__: Any) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    keys: Any = object_server.session().get_credentials()
    store = open_store(save_block(), root).with_retry(soon(0.5))
    monkeypatch.setattr(PrefectHttpxSyncClient, "send", away)
    monkeypatch.setattr(s3, "RENEW_S", 0)
    proxy.faults.expired_keys = {keys.access_key}
    with caplog.at_level(logging.WARNING, "layertap"), pytest.raises(StoreError, match="ExpiredToken"):
        store.put("data/a", b"x")
    assert "can't be loaded anew" in caplog.text and keys.secret_key not in caplog.text
    proxy.faults.expired_keys = set()
    store.put("data/a", b"x")
