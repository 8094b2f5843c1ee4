"""The store through a bad network: an object is complete or absent, and what lasts too long is named."""

import dataclasses
import secrets
import uuid
from collections.abc import Callable, Iterator

import pytest

from layertap.errors import AlreadyExistsError, StoreError, StoreRefusedError
from layertap.object_server import ObjectServer
from layertap.s3 import Bucket
from layertap.store import PATIENT, Store
from tests.conftest import BUCKET
from tests.proxy import Proxy

QUICK = {
    **PATIENT,
    "backoff": {**PATIENT["backoff"], "init_backoff": PATIENT["backoff"]["init_backoff"] / 20},
}
"""Patient, with shorter waits: the tests count failures, not seconds."""


@pytest.fixture
def proxy(object_server: ObjectServer) -> Iterator[Proxy]:
    with Proxy(object_server.ports.s3).running() as proxy:
        yield proxy


@pytest.fixture
def opened(object_server: ObjectServer, proxy: Proxy) -> Callable[..., Store]:
    """Opens a store through the proxy."""

    def open_store(**changes: object) -> Store:
        prefix = f"root-{uuid.uuid4().hex[:8]}"
        settings = object_server.settings(BUCKET, prefix=prefix)
        settings = dataclasses.replace(settings, endpoint_url=proxy.endpoint_url, **changes)  # type: ignore[arg-type]
        return Store(Bucket(settings, object_server.session()), QUICK)  # type: ignore[arg-type]

    return open_store


@pytest.mark.parametrize("fault", ["slow_down", "cut_upload", "lost_reply", "cut_reply"])
def test_every_object_comes_back_whole(opened: Callable[..., Store], proxy: Proxy, fault: str) -> None:
    store = opened()
    setattr(proxy.faults, fault, 0.3)
    bodies = {f"data/{i}": secrets.token_bytes(10_000 + i) for i in range(20)}
    for path, body in bodies.items():
        store.put(path, body)
    for path, body in bodies.items():
        assert store.get(path) == body
        assert store.get_range(path, 100, 50) == body[100:150]
        assert store.head(path).size == len(body)
    for _ in range(10):
        assert [info.path for info in store.list("data")] == sorted(bodies)
        assert store.folders("data") == []
    store.delete(list(bodies))
    assert store.list("data") == []
    assert proxy.counts[fault] >= 10


def test_an_object_of_several_parts_is_whole_or_absent(opened: Callable[..., Store], proxy: Proxy) -> None:
    store = opened()
    proxy.faults.slow_down = proxy.faults.lost_reply = 0.15
    body = secrets.token_bytes(70 << 20)
    store.put("data/large", body)
    assert store.get("data/large") == body


@pytest.mark.parametrize("fault", ["slow_down", "cut_upload", "lost_reply"])
def test_create_once_stays_once(opened: Callable[..., Store], proxy: Proxy, fault: str) -> None:
    """A create whose reply was lost has happened: it exists already, and what lies there is whole."""
    store = opened()
    setattr(proxy.faults, fault, 0.3)
    for i in range(20):
        try:
            store.create(f"state/{i}", b"first")
        except AlreadyExistsError:
            assert fault == "lost_reply"
        with pytest.raises(AlreadyExistsError):
            store.create(f"state/{i}", b"second")
        assert store.get(f"state/{i}") == b"first"


def test_a_store_that_ignores_the_condition_is_refused_with_the_way_out(
    opened: Callable[..., Store], proxy: Proxy
) -> None:
    proxy.faults.ignores_conditions = True
    with pytest.raises(StoreRefusedError, match="create-once on an existing object.*If-None-Match"):
        opened().check()


def test_checksum_headers_can_be_left_out(opened: Callable[..., Store], proxy: Proxy) -> None:
    proxy.faults.refuses_checksums = True
    with pytest.raises(StoreError, match="fails at put.*request_checksum_calculation"):
        opened().check()
    opened(checksums=False).check()


def test_expired_credentials_are_worth_another_try(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy
) -> None:
    store, keys = opened(), object_server.session().get_credentials()
    assert keys is not None
    proxy.faults.expired_keys = {keys.access_key}
    with pytest.raises(StoreError, match="ExpiredToken") as raised:
        store.put("data/a", b"x")
    assert raised.value.retriable
    proxy.faults.expired_keys = set()
    store.put("data/a", b"x")
