"""A PostgreSQL server for a test: Debian's package `postgresql`, on loopback, gone with the test."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PASSWORD = "not-for-process-lists"

ACCOUNT = "postgres"
"""PostgreSQL refuses to run as root; Debian's package makes this account."""


def _program(name: str) -> str:
    """`initdb` and the like; Debian keeps them out of the path."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(places[-1]) if places else None)
    assert found, f"{name} isn't installed, and this test may not be skipped: apt-get install postgresql"
    return found


@contextmanager
def postgres(port: int) -> Iterator[str]:
    """Run a server on `port`; gives SQLAlchemy's address of its database."""
    as_account: dict[str, Any] = {"user": ACCOUNT, "group": ACCOUNT} if os.getuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="layertap-postgres-"))
    try:
        if as_account:
            shutil.chown(folder, ACCOUNT, ACCOUNT)
        data = folder / "data"
        (folder / "password").write_text(PASSWORD)
        initdb = [_program("initdb"), "-D", str(data), "-A", "scram-sha-256", "-U", "layertap", "--no-sync"]
        initdb += ["--pwfile", str(folder / "password")]
        subprocess.run(initdb, check=True, capture_output=True, cwd=folder, **as_account)
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c fsync=off -k {folder}"
        control = [_program("pg_ctl"), "-D", str(data), "-l", str(folder / "log"), "-w"]
        subprocess.run([*control, "-o", options, "start"], check=True, cwd=folder, **as_account)
        try:
            yield f"postgresql+asyncpg://layertap:{PASSWORD}@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=True, cwd=folder, **as_account)
    finally:
        shutil.rmtree(folder)
