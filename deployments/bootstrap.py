"""What a Prefect server needs, made idempotently: work pools, deployments, automations, storage blocks.

`python -m deployments.bootstrap` makes all but the blocks on the server that Prefect's settings name.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layertap.errors import InputError, LayertapError

PREFECT_FILE = Path(__file__).with_name("prefect.yaml")

CONTROL_POOL = "layertap-control"
LANE_POOL = "layertap-gpu"

POOLS = {
    CONTROL_POOL: "Coordinators of extractions and preparations: no GPU, but the datasets",
    LANE_POOL: "Lanes: one worker a GPU, one flow run a worker (start them with `layertap workers`)",
}


class NoServerError(LayertapError):
    """Prefect's server doesn't answer, or not as it should."""


def require_server() -> None:
    """Refuse to go on without a Prefect server; Prefect would start a hidden one of its own.

    Raises:
        InputError: Prefect's settings name no server.
    """
    os.environ.setdefault("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "false")
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        raise InputError("no Prefect server: start one with `layertap up`, or set PREFECT_API_URL")


@contextmanager
def server_answers() -> Iterator[None]:
    """Say in one line that Prefect's server doesn't do what it is asked.

    Raises:
        NoServerError: it doesn't answer, or with an error.
    """
    import httpx
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import get_current_settings

    server = f"Prefect's server at {get_current_settings().api.url}"
    try:
        yield
    except httpx.TransportError as error:
        raise NoServerError(
            f"{server} doesn't answer ({error}): is it up? `layertap up` starts the embedded one"
        ) from error
    except PrefectHTTPStatusError as error:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise NoServerError(f"{server} wants another password: set PREFECT_API_AUTH_STRING") from error
        raise NoServerError(f"{server} refuses: {error}") from error


def make_pools() -> None:
    """Make the process work pools that aren't there yet."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with get_client(sync_client=True) as client:
        for name, description in POOLS.items():
            pool = WorkPoolCreate(
                name=name, type="process", description=description, base_job_template=_job_template()
            )
            try:
                client.create_work_pool(pool)
            except ObjectAlreadyExists:
                continue


def deploy(environment: Mapping[str, str]) -> None:
    """Make the deployments of prefect.yaml, or bring them up to date.

    Raises:
        InputError: they can't be made; with what Prefect says.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(
        [*command, "--prefect-file", str(PREFECT_FILE)], env=dict(environment), capture_output=True, text=True
    )
    if done.returncode:
        raise InputError(f"the deployments of {PREFECT_FILE} can't be made:\n{done.stdout}{done.stderr}")


def has_worker(pool: str) -> bool:
    """Whether a worker of the pool has reported itself and not gone silent."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import WorkerStatus

    with get_client(sync_client=True) as client:
        workers = client.read_workers_for_work_pool(pool)
    return any(worker.status == WorkerStatus.ONLINE for worker in workers)


def _job_template() -> dict[str, Any]:
    from prefect.workers.process import ProcessWorker

    return ProcessWorker.get_default_base_job_template()


def save_s3_block(
    name: str,
    *,
    bucket: str,
    folder: str = "",
    endpoint_url: str | None = None,
    region: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Save an S3 bucket block with its credentials, over one of that name; returns its reference.

    Without keys the hosts' own credentials are used (environment, profile, role).
    """
    from prefect_aws import AwsCredentials, S3Bucket
    from prefect_aws.client_parameters import AwsClientParameters
    from pydantic import SecretStr

    credentials = AwsCredentials(
        aws_access_key_id=access_key,
        aws_secret_access_key=SecretStr(secret_key) if secret_key else None,
        region_name=region,
        aws_client_parameters=AwsClientParameters(
            endpoint_url=endpoint_url, config=dict(config) if config else None
        ),
    )
    credentials.save(name, overwrite=True)
    S3Bucket(bucket_name=bucket, bucket_folder=folder, credentials=credentials).save(name, overwrite=True)
    return f"s3-bucket/{name}"


def main() -> None:
    """Make pools, deployments and automations; blocks are made in the UI or with `save_s3_block`."""
    require_server()
    make_pools()
    print(f"work pools: {', '.join(POOLS)}")
    deploy(os.environ)
    from deployments.automations import make_automations

    print(f"deployments of {PREFECT_FILE.name} are there; automations: {', '.join(make_automations())}")


if __name__ == "__main__":
    main()
