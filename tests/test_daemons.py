"""Background processes: found again, ended, and clear about what keeps them from starting."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from deployments.daemons import Daemon, DaemonError, answers, check_port_free
from layertap.errors import InputError

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(name="sleeper", state=tmp_path)


def test_a_started_process_is_found_until_it_is_ended(daemon: Daemon) -> None:
    assert daemon.process() is None
    daemon.start(SLEEP, os.environ)
    found = Daemon(name="sleeper", state=daemon.state).process()
    assert found is not None
    assert os.getsid(found.pid) == found.pid, "it must outlive the terminal"
    assert daemon.end(timeout_s=10)
    assert daemon.process() is None
    assert not daemon.end(timeout_s=10)


def test_another_process_with_its_pid_is_left_alone(daemon: Daemon) -> None:
    pids = daemon.state / "pids"
    pids.mkdir()
    (pids / "sleeper.json").write_text(json.dumps({"pid": os.getpid(), "created": 0.0}))
    assert daemon.process() is None
    assert not daemon.end(timeout_s=1)


def test_a_process_that_dies_while_starting_shows_its_log(daemon: Daemon) -> None:
    daemon.start([sys.executable, "-c", "raise SystemExit('no database')"], os.environ)
    with pytest.raises(DaemonError, match="sleeper ended while starting.*\n.*no database"):
        daemon.wait_until(lambda: answers("http://127.0.0.1:9/"), timeout_s=30)


def test_a_process_that_stays_silent_is_named(daemon: Daemon) -> None:
    daemon.start(SLEEP, os.environ)
    with pytest.raises(DaemonError, match="sleeper isn't up after 1 s"):
        daemon.wait_until(lambda: answers("http://127.0.0.1:9/"), timeout_s=1)
    daemon.end(timeout_s=10)


def test_a_taken_port_is_named_with_the_option_that_moves_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}, wanted for a test, is taken.*--port"):
            check_port_free(port, purpose="a test", option="--port")
    check_port_free(port, purpose="a test", option="--port")
