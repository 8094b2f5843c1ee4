"""The embedded stack of `layertap up`: Prefect, an S3 server, workers and deployments, on loopback.

All it keeps (database, objects, logs, pids) lies in one folder; the user's own Prefect home is untouched.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from deployments.automations import make_automations
from deployments.bootstrap import (
    CONTROL_POOL,
    LANE_POOL,
    deploy,
    has_worker,
    make_pools,
    save_s3_block,
)
from deployments.commands import DATABASE_VARIABLE
from deployments.daemons import Daemon, answers, check_port_free
from deployments.workers import lane_workers
from layertap.errors import InputError
from layertap.object_server import ObjectServer, ServerPorts

BLOCK = "layertap"

STORAGE = f"s3-bucket/{BLOCK}"
"""The stack's storage block."""

START_S = 180.0
SERVER_STOP_S = 30.0
WORKERS_STOP_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An embedded stack: its folder and its ports."""

    state: Path
    port: int = 4200
    """Prefect's API and UI."""

    s3_port: int = 8333
    """First of the object server's five ports."""

    database: str = ""
    """SQLAlchemy's address of Prefect's database; SQLite in the state folder by default."""

    @classmethod
    def load(cls, state: Path) -> "Stack | None":
        """The stack that was started in `state`, or None."""
        try:
            return cls(state=state.resolve(), **json.loads((state / "stack.json").read_text()))
        except FileNotFoundError:
            return None

    def save(self) -> None:
        """Write down what `load` reads, for its owner alone: the database's address may hold a password."""
        path = self.state / "stack.json"
        path.touch()
        path.chmod(0o600)
        path.write_text(json.dumps({"port": self.port, "s3_port": self.s3_port, "database": self.database}))

    @property
    def database_url(self) -> str:
        """SQLAlchemy's address of Prefect's database, with its password if it has one."""
        return self.database or f"sqlite+aiosqlite:///{self.state / 'prefect' / 'prefect.db'}"

    @property
    def database_name(self) -> str:
        """The database's address without a password, to show and to compare."""
        from sqlalchemy.engine import make_url

        url = make_url(self.database_url)._replace(password=None)
        return url.difference_update_query(["password"]).render_as_string()

    @property
    def ui_url(self) -> str:
        """Address of Prefect's UI."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_url(self) -> str:
        """Address of Prefect's API."""
        return f"{self.ui_url}/api"

    def daemon(self, name: str) -> Daemon:
        """One of `server`, `control`, `lanes`."""
        return Daemon(name=name, state=self.state)

    @property
    def objects(self) -> Path:
        """Folder of the object server."""
        return self.state / "objects"

    def environment(self) -> dict[str, str]:
        """That of everything that talks to this stack: none of the user's Prefect settings, no database."""
        home = self.state / "prefect"
        strangers = ("PREFECT_", DATABASE_VARIABLE)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
        return kept | {
            "PREFECT_HOME": str(home),
            "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        }

    def server_environment(self) -> dict[str, str]:
        """That of Prefect's server, which alone knows the database and its password."""
        return self.environment() | {"PREFECT_SERVER_DATABASE_CONNECTION_URL": self.database_url}

    def use(self) -> None:
        """Point this process at the stack; before the first import of Prefect."""
        environment = self.environment()
        os.environ.clear()
        os.environ.update(environment)


def up(stack: Stack, *, num_lanes: int | None = None, say: Callable[[str], None]) -> None:
    """Start what doesn't run yet of the stack, and deploy to it.

    Args:
        stack: what to start.
        num_lanes: workers for lanes; by default one for each GPU.
        say: told what comes next, for it takes a minute.

    Raises:
        InputError: a port is taken, or the stack in this folder is on another database.
        DeviceError: more lanes were asked for than there are GPUs.
        DaemonError: a process of the stack didn't start.
    """
    lane_workers(num_lanes)
    _check_database(stack)
    runs_already = _runs_already(stack)
    stack.state.mkdir(parents=True, exist_ok=True, mode=0o700)  # the database holds the blocks' secrets
    try:
        say("object store")
        objects = _start_objects(stack)
        say("Prefect's server")
        start_server(stack)
        stack.save()  # not before: a mistyped database would be the folder's for good
        stack.use()
        say("work pools, deployments, automations")
        make_pools()
        _save_block(objects)
        deploy(stack.environment())
        make_automations()
        say("workers")
        _start_workers(stack, num_lanes)
    except BaseException:
        if not runs_already:
            down(stack)
        raise


def _check_database(stack: Stack) -> None:
    """Raise InputError if the runs of the stack in this folder are in another database: they would vanish."""
    kept = Stack.load(stack.state)
    if kept and kept.database_name != stack.database_name:
        asked = f"{DATABASE_VARIABLE}, or --database" if kept.database else f"no {DATABASE_VARIABLE}"
        raise InputError(
            f"the stack in {stack.state} has its runs in {kept.database_name}, not in "
            f"{stack.database_name}: give the same database again ({asked}), or another folder (--state)"
        )


def _runs_already(stack: Stack) -> bool:
    """Whether the stack's server is up.

    Raises:
        InputError: it is, on other ports than these.
    """
    if stack.daemon("server").process() is None:
        return False
    running = Stack.load(stack.state)
    if running and (running.port, running.s3_port) != (stack.port, stack.s3_port):
        raise InputError(
            f"the stack in {stack.state} runs already, on ports {running.port} and {running.s3_port}: "
            f"give these (--port, --s3-port), or end it first with `layertap down --state {stack.state}`"
        )
    return True


def _start_objects(stack: Stack) -> ObjectServer:
    if (running := ObjectServer.running(stack.objects)) is not None:
        return running
    names = [field.name for field in fields(ServerPorts)]
    ports = ServerPorts(**{name: stack.s3_port + k for k, name in enumerate(names)})
    try:
        ports.check_free()
    except InputError as error:
        raise InputError(f"{error}; --s3-port moves all five") from error
    return ObjectServer.start(stack.objects, ports=ports)


def _save_block(objects: ObjectServer) -> None:
    keys = objects.session().get_credentials()
    assert keys is not None
    save_s3_block(
        BLOCK,
        bucket=objects.settings().bucket,
        endpoint_url=objects.endpoint_url,
        region=objects.settings().region,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        config={"s3": {"addressing_style": "path"}},
    )


def start_server(stack: Stack) -> None:
    """Start Prefect's server, unless it runs, and wait until it answers."""
    server = stack.daemon("server")
    if server.process() is None:
        check_port_free(stack.port, purpose="Prefect's server", option="--port")
        (stack.state / "prefect").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "prefect", "server", "start"]
        server.start([*command, "--host", "127.0.0.1", "--port", str(stack.port)], stack.server_environment())
    server.wait_until(lambda: answers(f"{stack.api_url}/health"), START_S)


def _start_workers(stack: Stack, num_lanes: int | None) -> None:
    workers = [sys.executable, "-m", "layertap.cli", "workers"]
    lanes = [] if num_lanes is None else ["--lanes", str(num_lanes)]
    for name, options in (("control", ["--control"]), ("lanes", lanes)):
        if stack.daemon(name).process() is None:
            stack.daemon(name).start([*workers, *options], stack.environment())
    for name, pool in (("control", CONTROL_POOL), ("lanes", LANE_POOL)):
        stack.daemon(name).wait_until(partial(has_worker, pool), START_S)


def down(stack: Stack) -> list[str]:
    """End the stack, its flow runs first; returns the names of what was ended.

    The coordinators go first: each tells its lanes to stop and takes back those that still wait for a worker.
    """
    waits = {"control": WORKERS_STOP_S, "lanes": WORKERS_STOP_S, "server": SERVER_STOP_S}
    ended = [name for name, timeout_s in waits.items() if stack.daemon(name).end(timeout_s)]
    if (objects := ObjectServer.running(stack.objects)) is not None:
        objects.stop()
        ended.append("objects")
    return ended
