"""Roots in a Prefect storage block: `s3-bucket/NAME` or `local-file-system/NAME`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.blocks.core import Block
from prefect.filesystems import LocalFileSystem, WritableFileSystem
from prefect_aws import AwsCredentials, S3Bucket

from layertap.dataset_files import FileState, StoredDataset, default_cache, local_files
from layertap.errors import InputError
from layertap.store import S3Settings, Store

if TYPE_CHECKING:
    import boto3


def load_block(reference: str) -> WritableFileSystem:
    """The storage block that `reference` names.

    Raises:
        InputError: there is no such block, or it is of another type.
    """
    try:
        block: Any = Block.load(reference)
    except ValueError as error:
        raise InputError(
            f"storage block {reference!r} can't be loaded: {error}. "
            "Blocks are made in Prefect's UI under Blocks, or by deployments/bootstrap.py"
        ) from error
    if not isinstance(block, S3Bucket | LocalFileSystem):
        raise InputError(f"storage {reference!r} is neither an s3-bucket nor a local-file-system block")
    return block


def open_store(reference: str, root: str) -> Store:
    """The root in folder `root` of a storage block.

    Raises:
        InputError: there is no such block.
    """
    return store_in(load_block(reference), root)


def store_in(block: WritableFileSystem, root: str) -> Store:
    """The root in folder `root` of a storage block that is loaded."""
    if isinstance(block, S3Bucket):
        prefix = f"{block.bucket_folder.strip('/')}/{root}"
        return _s3_store(block, block.bucket_name, prefix)
    assert isinstance(block, LocalFileSystem)
    return Store.folder(Path(block.basepath or ".").expanduser() / root)


def dataset_files(reference: str, dataset: str) -> tuple[FileState, ...]:
    """State of a dataset's files, wherever it lies; changes when they do.

    Raises:
        DatasetError: there is none.
        InputError: the address names no dataset, or there is no such block.
    """
    stored = _stored_dataset(reference, dataset)
    return stored.files() if stored else local_files(Path(dataset))


def local_dataset(reference: str, dataset: str) -> str:
    """The dataset's path on this host; from `s3://` it is staged, with the credentials of the storage block.

    Raises:
        DatasetError: there is none, or the disk is too small.
        InputError: the address names no dataset, or there is no such block.
    """
    stored = _stored_dataset(reference, dataset)
    return str(stored.stage(default_cache())) if stored else dataset


def _stored_dataset(reference: str, dataset: str) -> StoredDataset | None:
    if not dataset.startswith("s3://"):
        return None
    bucket, _, key = dataset.removeprefix("s3://").rstrip("/").partition("/")
    if not (bucket and key):
        raise InputError(f"the dataset {dataset!r} names no part of a bucket: give s3://bucket/prefix")
    prefix, _, name = key.rpartition("/")
    block = load_block(reference)
    if not isinstance(block, S3Bucket):
        return StoredDataset(Store.open(f"s3://{bucket}/{prefix}"), name)
    return StoredDataset(_s3_store(block, bucket, prefix), name)


def _s3_store(block: S3Bucket, bucket: str, prefix: str) -> Store:
    """With the credentials that the block has by then: whoever replaces them mends runs under way."""
    reference = f"{block.get_block_type_slug()}/{block._block_document_name}"
    settings = s3_settings(block, bucket, prefix)
    return Store.s3(settings, boto3_session(block.credentials), partial(_session_of, reference))


def _session_of(reference: str) -> "boto3.Session":
    block = load_block(reference)
    assert isinstance(block, S3Bucket)
    return boto3_session(block.credentials)


def s3_settings(block: S3Bucket, bucket: str, prefix: str) -> S3Settings:
    """How a bucket is reached: what the block's client parameters tell boto3, told to layertap's store."""
    parameters = block.credentials.aws_client_parameters
    config = parameters.config or {}
    style = config.get("s3", {}).get("addressing_style", "auto")
    by_path = parameters.endpoint_url is not None or "." in bucket
    ca_file = parameters.verify_cert_path
    return S3Settings(
        bucket=bucket,
        prefix=prefix,
        endpoint_url=parameters.endpoint_url,
        region=block.credentials.region_name,
        path_style=style == "path" or (style == "auto" and by_path),
        verify=str(ca_file) if ca_file else parameters.verify is not False,
        checksums=config.get("request_checksum_calculation") != "when_required",
    )


def boto3_session(credentials: Any) -> "boto3.Session":
    """A session with the block's credentials. An assumed role's are renewed before they expire.

    The block itself assumes a role once, for an hour; extractions take longer.
    """
    if not isinstance(credentials, AwsCredentials) or not credentials.assume_role_arn:
        session: boto3.Session = credentials.get_boto3_session()
        return session
    return _session_with_role(credentials, credentials.assume_role_arn)


def _session_with_role(credentials: AwsCredentials, role: str) -> "boto3.Session":
    import boto3
    import botocore.session
    from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials

    own = credentials.model_copy(update={"assume_role_arn": None}).get_boto3_session()
    fetcher = AssumeRoleCredentialFetcher(
        client_creator=own._session.create_client,
        source_credentials=own.get_credentials(),
        role_arn=role,
        extra_args=credentials.assume_role_kwargs.get_params_override(),
    )
    session: Any = botocore.session.get_session()
    session._credentials = DeferredRefreshableCredentials(fetcher.fetch_credentials, "assume-role")
    return boto3.Session(botocore_session=session, region_name=credentials.region_name)
