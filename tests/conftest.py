"""Real stores for tests: a folder, and a bucket of an S3 server that is started once."""

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from layertap.object_server import ObjectServer, ServerPorts
from layertap.store import Store

BUCKET = "layertap-tests"


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A real S3 server on free ports with an empty bucket."""
    folder = tmp_path_factory.mktemp("object-server")
    server = ObjectServer.start(folder, ports=ServerPorts.free(), buckets=[BUCKET])
    # the server outlives its starter: a test run that is told to end must still come to its stop
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM"))
    yield server
    server.stop()


@pytest.fixture
def aws_environment(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment in which `Store.open("s3://…")` and child processes reach the server."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_store(object_server: ObjectServer, aws_environment: None) -> Store:
    """A fresh root in the bucket."""
    settings = object_server.settings(BUCKET, prefix=f"root-{uuid.uuid4().hex[:8]}")
    return Store.s3(settings, object_server.session())


@pytest.fixture
def embedded(object_server: ObjectServer, tmp_path: Path) -> Callable[[str | Path], list[str]]:
    """Copies a folder's root into the bucket; gives its address and the option that finds its server."""
    state = tmp_path / "state"

    def copy(root: str | Path) -> list[str]:
        state.mkdir()
        (state / "objects").symlink_to(object_server.folder)
        prefix = f"root-{uuid.uuid4().hex[:8]}"
        store = Store.s3(object_server.settings(BUCKET, prefix), object_server.session())
        for path in filter(Path.is_file, Path(root).rglob("*")):
            store.put(str(path.relative_to(root)), path.read_bytes())
        return [f"s3://{BUCKET}/{prefix}", "--state", str(state)]

    return copy


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    """A fresh root on a folder."""
    return Store.folder(tmp_path / "root")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    """A fresh root, once on a folder and once on S3."""
    fresh: Store = request.getfixturevalue(f"{request.param}_store")
    return fresh


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server of its own, that leaves the user's Prefect home alone."""
    from prefect.testing.utilities import prefect_test_harness

    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            patch.delenv(name)
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        with prefect_test_harness(server_startup_timeout=60):
            yield


@pytest.fixture
def modeling_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What compiling replaces in transformers' modules comes back afterwards."""
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_next import modeling_qwen3_next

    from layertap.compiled import CONVOLUTION, DELTA_RULE

    for module in (modeling_qwen3_5, modeling_qwen3_next):
        for name in (DELTA_RULE, CONVOLUTION):
            monkeypatch.setattr(module, name, getattr(module, name))
    yield
    torch._dynamo.reset()
