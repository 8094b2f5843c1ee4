"""Storage blocks: their client parameters reach the store, their credentials refresh."""

from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import RefreshableCredentials
from prefect_aws import AwsCredentials, S3Bucket
from prefect_aws.client_parameters import AwsClientParameters
from pydantic import SecretStr

from layertap.errors import InputError
from layertap.store import S3Settings
from tasks.storage import boto3_session, dataset_files, local_dataset, s3_settings, store_in


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
