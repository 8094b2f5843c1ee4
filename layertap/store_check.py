"""Whether a store can do what a run needs, tried before the run, and whether it has room."""

import contextlib
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from layertap.errors import AlreadyExistsError, IntegrityError, StoreError, StoreRefusedError
from layertap.findings import Findings
from layertap.retries import PATIENT
from layertap.store import Store

if TYPE_CHECKING:
    from obstore.store import RetryConfig

BRIEF: "RetryConfig" = {
    **PATIENT,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {**PATIENT["backoff"], "max_backoff": timedelta(seconds=2)},
}
"""A wrong address must show soon."""

NO_CONDITION = (
    "it takes no notice of `If-None-Match: *`, without which two lanes could both commit a shard: use one "
    "that honours it, such as AWS S3 or SeaweedFS, or a folder"
)

UNKNOWN_HEADER = re.compile(r"\[(InvalidArgument|InvalidRequest|NotImplemented)\]")

CHECKSUM_HINT = (
    ". If it knows no checksum headers, set request_checksum_calculation to when_required "
    "(AWS_REQUEST_CHECKSUM_CALCULATION, or in the block's client config)"
)

ADDRESS = re.compile(r"https?://[^\s/\"]+")
"""Of the store, in what obstore and boto3 say of a request."""


def check_store(store: Store) -> None:
    """Try what a run needs, on objects of its own under `check/`.

    Raises:
        StoreRefusedError: the store refuses an operation or answers it wrongly; names it. Or no name server
            knows its host.
        StoreError: the store is away, or fails for now; names the operation too.
        NotReadyError: several operations are refused; names all of them.
    """
    quick = store.with_retry(BRIEF)
    path, body = f"check/{secrets.token_hex(8)}", secrets.token_bytes(64)
    once = f"{path}-once"
    found = Findings(f"the store {store.uri} can't serve a run")

    def attempt(name: str, operation: Callable[[], object]) -> None:
        with found.noted():
            _try(store.uri, name, operation)

    attempt("put", lambda: quick.put(path, body))
    found.check()  # nothing is there to try the rest on
    attempt("head", lambda: quick.head(path).size == len(body))
    attempt("put and confirm", lambda: quick.put(path, body, durable=True))
    attempt("range get", lambda: quick.get_range(path, 3, 9) == body[3:12])
    attempt("list", lambda: path in [o.path for o in quick.list("check")])
    attempt("create-once", lambda: _create(quick, once, body))
    attempt("create-once on an existing object", lambda: _refuse_second(quick, path))
    attempt("delete", lambda: quick.delete([path, once]))
    found.check()
    attempt("head after delete", lambda: not quick.exists(path))
    found.check()


def probe(store: Store) -> None:
    """Write and delete a small object, with little patience.

    Raises:
        StoreError: the store fails at it.
    """
    quick, path = store.with_retry(BRIEF), f"check/{secrets.token_hex(8)}"
    quick.put(path, b"probe", durable=True)
    quick.delete([path])


def check_space(store: Store, num_bytes: int) -> None:
    """Refuse to begin what a folder's disk has no room for; the quota of a bucket can't be asked for.

    Raises:
        StoreRefusedError: says how much is free, and how much is needed.
    """
    root = store.local_path("layertap.json")
    if root is None:
        return
    there = next(folder for folder in root.parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise StoreRefusedError(
            f"{store.uri} has {free / 1e9:,.1f} GB free, and {num_bytes / 1e9:,.1f} GB are to be stored: "
            "make room, take another folder, extract fewer layers or rows, or, if files move away while the "
            "run goes on, switch check_space off"
        )


def _try(uri: str, name: str, operation: Callable[[], object]) -> None:
    try:
        result = operation()
    except (StoreError, IntegrityError) as error:
        is_away = type(error) is StoreError
        unknown = _unknown_host(str(error)) if is_away else None
        kind = StoreError if is_away and not unknown else StoreRefusedError
        hint = CHECKSUM_HINT if UNKNOWN_HEADER.search(str(error)) else ""
        if unknown:
            hint = f". No name server knows {unknown}: correct the store's endpoint_url, or its region"
        raise kind(f"the store {uri} fails at {name}: {error}{hint}") from error
    if result is False:
        raise StoreRefusedError(f"the store {uri} fails at {name}: the answer is not what was asked for")


def _unknown_host(failure: str) -> str | None:
    """The host in a store's failure if it has no address; name servers that don't answer prove nothing."""
    found = ADDRESS.search(failure)
    host = urlsplit(found[0]).hostname if found else None
    if host:
        try:
            socket.getaddrinfo(host, None)
        except socket.gaierror as error:
            return host if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) else None
    return None


def _create(store: Store, path: str, body: bytes) -> bool:
    """Whether an object is there that may have been created by a try whose reply was lost."""
    with contextlib.suppress(AlreadyExistsError):
        store.create(path, body)
    return store.get(path) == body


def _refuse_second(store: Store, path: str) -> None:
    with contextlib.suppress(AlreadyExistsError):
        store.create(path, b"second")
        raise StoreRefusedError(NO_CONDITION)
