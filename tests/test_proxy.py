"""The store through a bad network: an object is complete or absent, and what lasts too long is named."""

import dataclasses
import re
import secrets
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from layertap import s3
from layertap.coordinator import Run
from layertap.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    NotReadyError,
    StoreError,
    StoreRefusedError,
)
from layertap.garbage import Garbage, find_garbage
from layertap.object_server import ObjectServer
from layertap.retries import PATIENT
from layertap.s3 import Bucket
from layertap.store import PART_BYTES, SMALL_BYTES, Store, checksum, crc64nvme
from layertap.store_check import check_store
from layertap.verify import verify_root
from tests.certificates import Authority
from tests.conftest import BUCKET
from tests.models import saved, tiny_llama
from tests.proxy import Faults, Proxy
from tests.runs import assert_read_back, run_lane, save_rows, settings_for, some_rows
from tests.stored import claimed, dataset_of, new_catalog, plan_for, write_attempt
from tests.stored import some_rows as few_rows

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
        changed: dict[str, Any] = {"endpoint_url": proxy.endpoint_url, **changes}
        settings = dataclasses.replace(settings, **changed)
        return Store(Bucket(settings, object_server.session()), QUICK)  # type: ignore[arg-type]

    return open_store


@pytest.mark.parametrize(
    ("fault", "share"),
    [("slow_down", 0.3), ("cut_upload", 0.3), ("lost_reply", 0.3), ("cut_reply", 0.3), ("flip_upload", 0.5)],
)
def test_every_object_comes_back_whole(
    opened: Callable[..., Store], proxy: Proxy, fault: str, share: float
) -> None:
    store = opened()
    setattr(proxy.faults, fault, share)
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


def test_only_what_was_done_to_a_request_counts(opened: Callable[..., Store], proxy: Proxy) -> None:
    store = opened()
    proxy.faults.cut_reply, proxy.faults.flip_upload = 0.5, 0.5
    while proxy.counts["requests"] < 20:
        assert not store.exists("data/a")
    assert proxy.counts == {"requests": 20}


class Damager:
    """Overwrites objects behind the store's back, as soon as they are stored, with other bytes."""

    def __init__(self, server: ObjectServer, damaged: Callable[[bytes], bytes], *, num_times: int) -> None:
        bucket = server.settings(BUCKET)
        self._direct = Store.s3(bucket, server.session())
        self._damaged = damaged
        self.num_left = num_times

    def __call__(self, path: str) -> None:
        if self.num_left:
            self.num_left -= 1
            name = path.removeprefix(f"/{BUCKET}/")
            self._direct.put(name, self._damaged(self._direct.get(name)))


WAYS_TO_PUT: dict[str, Callable[[Store, bytes], object]] = {
    "whole": lambda store, body: store.put("data/a", body, durable=True),
    "with its checksum": lambda store, body: store.put("data/a", body, durable=True, crc=crc64nvme(body)),
    "from pieces": lambda store, body: store.put_chunks("data/a", lambda: iter([body[:7], body[7:]])),
}

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda body: bytes([body[0] ^ 1]) + body[1:],
    "short": lambda body: body[:-1],
}


@pytest.mark.parametrize(
    ("size", "way", "damage"),
    [*product([10_000], WAYS_TO_PUT, DAMAGES), (PART_BYTES + 1, "with its checksum", "flipped")],
)
def test_an_object_that_is_stored_damaged_is_put_again_and_then_named(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy, size: int, way: str, damage: str
) -> None:
    store, body = opened(), secrets.token_bytes(size)
    proxy.faults.on_stored = Damager(object_server, DAMAGES[damage], num_times=1)
    WAYS_TO_PUT[way](store, body)
    assert store.get("data/a") == body
    proxy.faults.on_stored = Damager(object_server, DAMAGES[damage], num_times=2)
    told = f"data/a holds .* bytes of crc64nvme:.* after {size:,} bytes of {checksum(body)} were put, 2 times"
    with pytest.raises(IntegrityError, match=told):
        WAYS_TO_PUT[way](store, body)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_that_is_stored_damaged_is_put_again_and_never_absent(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy, damage: str
) -> None:
    store, body = opened(), secrets.token_bytes(100)
    store.create("state/a", body)
    assert proxy.counts["requests"] == 2, "what was sent is confirmed by one request"
    proxy.faults.on_stored = Damager(object_server, DAMAGES[damage], num_times=1)
    store.create("state/b", body)
    assert store.get("state/b") == body
    proxy.faults.on_stored = Damager(object_server, DAMAGES[damage], num_times=3)
    with pytest.raises(IntegrityError, match=r"state/c holds .* bytes of crc64nvme:.* after 100 bytes"):
        store.create("state/c", body)
    for name in "abc":
        with pytest.raises(AlreadyExistsError):
            store.create(f"state/{name}", b"another")
    assert not any(request.startswith(("DELETE", "POST")) for request in proxy.requests)


def test_an_outcome_that_is_stored_damaged_by_a_try_whose_reply_was_lost_is_put_again(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy, tmp_path: Path
) -> None:
    catalog = new_catalog(opened())
    plan = plan_for(*dataset_of(few_rows(5), tmp_path / "rows.parquet"), catalog)
    claim = claimed(catalog, plan, 0)
    outcome = write_attempt(catalog, claim)
    proxy.faults.first = {"lost_reply": re.compile(r"PUT .*\.outcome$")}
    more_rows = lambda body: body.replace(b'"num_rows": ', b'"num_rows": 1')  # noqa: E731
    proxy.faults.on_stored = Damager(object_server, more_rows, num_times=1)
    assert catalog.commit(claim, outcome) == outcome
    assert catalog.outcome(plan.plan_id, 0) == outcome
    assert proxy.counts["lost_reply"] == 1


def test_of_a_store_that_keeps_no_checksums_sizes_are_compared_and_that_is_said(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(checksums=False)
    for _ in range(3):
        store.put("data/a", b"0123", durable=True)
    assert caplog.text.count("keeps no CRC64NVME of objects: after a put only sizes are compared") == 1
    proxy.faults.on_stored = lambda path: Store.s3(
        dataclasses.replace(object_server.settings(BUCKET), checksums=False), object_server.session()
    ).put(path.removeprefix(f"/{BUCKET}/"), b"012")
    with pytest.raises(IntegrityError, match="data/a holds 3 bytes after 4 bytes of"):
        store.put("data/a", b"0123", durable=True)


def test_an_object_that_is_gone_when_it_should_be_confirmed_is_named(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy
) -> None:
    store, direct = opened(), Store.s3(object_server.settings(BUCKET), object_server.session())
    proxy.faults.on_stored = lambda path: direct.delete([path.removeprefix(f"/{BUCKET}/")])
    with pytest.raises(NotFoundError, match="can't confirm .*data/a"):
        store.put("data/a", b"0123", durable=True)


def test_an_object_of_several_parts_is_whole_or_absent(opened: Callable[..., Store], proxy: Proxy) -> None:
    store = opened()
    proxy.faults.slow_down = proxy.faults.lost_reply = 0.15
    body = secrets.token_bytes(70 << 20)
    store.put("data/large", body)
    assert store.get("data/large") == body


@pytest.mark.parametrize("fault", ["slow_down", "lost_reply"])
@pytest.mark.parametrize("from_pieces", [False, True])
def test_an_upload_whose_start_fails_is_started_again_and_what_stays_of_it_gc_sees(
    opened: Callable[..., Store], proxy: Proxy, monkeypatch: pytest.MonkeyPatch, from_pieces: bool, fault: str
) -> None:
    """Of a start whose reply was lost nobody knows the upload's id."""
    monkeypatch.setattr("layertap.store.PART_BYTES", 5 << 20)
    store, body, path = new_catalog(opened()).store, secrets.token_bytes((5 << 20) + 1), "plans/p/data/a"
    start = re.compile(rf"POST .*/{path}\?uploads(=?&|=?$)")
    proxy.faults.first = {fault: start}
    if from_pieces:
        store.put_chunks(path, lambda: iter([body[:7], body[7:]]))
    else:
        store.put(path, body, durable=True)
    assert store.get(path) == body
    assert (proxy.counts[fault], len(list(filter(start.match, proxy.requests)))) == (1, 2)

    garbage = find_garbage(store, older_than=timedelta(0))
    assert [upload.path for upload in garbage.uploads] == [path] * (fault == "lost_reply")
    garbage.delete()
    assert not store.open_uploads()
    assert store.get(path) == body


@pytest.mark.parametrize("fault", ["slow_down", "cut_upload", "lost_reply", "cut_reply"])
def test_an_object_from_pieces_is_whole_and_begun_anew_if_need_be(
    opened: Callable[..., Store], proxy: Proxy, fault: str
) -> None:
    store, num_calls, num_objects = opened(), 0, 0

    def pieces(body: bytes) -> Iterator[bytes]:
        nonlocal num_calls
        num_calls += 1
        yield from (body[k : k + (3 << 20)] for k in range(0, len(body), 3 << 20))

    while num_objects < 4 or (fault == "cut_reply" and num_calls == num_objects):
        assert num_objects < 60
        body = secrets.token_bytes(PART_BYTES + 1000 if num_objects == 0 else 1000)
        setattr(proxy.faults, fault, 0.3)
        store.put_chunks("data/a", partial(pieces, body))
        setattr(proxy.faults, fault, 0.0)
        assert store.get("data/a") == body
        num_objects += 1


def test_lanes_that_write_the_same_object_at_once_don_t_end_each_other_s_uploads(
    opened: Callable[..., Store], proxy: Proxy
) -> None:
    store, proxy.faults.lost_reply = opened(), 0.3
    body = secrets.token_bytes(10_000)

    def write(_: int) -> None:
        store.put_chunks("target/a", lambda: iter([body]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(40)))
    assert store.get("target/a") == body


def test_a_whole_run_gets_through_a_network_that_fails_at_every_fifth_call(
    opened: Callable[..., Store], proxy: Proxy, tmp_path: Path
) -> None:
    model, rows, store = tiny_llama(), some_rows(60), opened()
    settings = settings_for(save_rows(rows, tmp_path / "rows"), saved(model, tmp_path / "target"))
    proxy.faults = Faults(slow_down=0.08, cut_upload=0.04, lost_reply=0.04, cut_reply=0.04)
    run = Run.prepare(store, settings)
    assert run.plan is not None
    run_lane(store, run.plan.plan_id, settings.target)
    run.publish().check(0.0)
    assert Run.prepare(store, settings).plan is None
    assert 0.1 < (sum(proxy.counts.values()) / proxy.counts["requests"] - 1) < 0.4
    proxy.faults = Faults()
    verify_root(store, num_rows=None).check()
    assert_read_back(store, rows, model)


@pytest.mark.parametrize("fault", ["slow_down", "cut_upload", "lost_reply", "conflict"])
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


def test_a_conflict_that_lasts_is_no_word_that_the_object_exists(
    opened: Callable[..., Store], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.faults.conflict = 1.0
    store = opened().with_retry({**PATIENT, "retry_timeout": timedelta(0)})
    with pytest.raises(StoreError, match="ConditionalRequestConflict") as caught:
        store.create("state/0", b"first")
    assert type(caught.value) is StoreError and not store.exists("state/0")


def test_objects_that_stay_for_now_are_deleted_and_those_that_must_stay_are_said(
    opened: Callable[..., Store], proxy: Proxy
) -> None:
    store = opened()
    for name in "ab":
        store.put(f"data/{name}", b"x")
    proxy.faults.undeleted = ["SlowDown", "InternalError"]
    store.delete(["data/a", "data/b"])
    assert store.list("data") == [] and not proxy.faults.undeleted
    proxy.faults.undeleted = ["AccessDenied"]
    with pytest.raises(StoreRefusedError, match="AccessDenied"):
        store.delete(["data/a"])


def test_garbage_goes_beside_what_must_stay(opened: Callable[..., Store], proxy: Proxy) -> None:
    garbage = Garbage(store=opened(), reasons={f"data/{k}": "a test" for k in range(3)})
    for path in garbage.reasons:
        garbage.store.put(path, b"x")
    proxy.faults.undeleted = ["AccessDenied"] * 2  # of all together, and then of one
    with pytest.raises(StoreRefusedError, match=r"1 of 3 objects can't be deleted.*data/\d.*AccessDenied"):
        garbage.delete()
    assert len(garbage.store.list("data")) == 1


def test_a_store_that_ignores_the_condition_is_refused_with_the_way_out(
    opened: Callable[..., Store], proxy: Proxy
) -> None:
    proxy.faults.ignores_conditions = True
    with pytest.raises(StoreRefusedError, match="create-once on an existing object.*If-None-Match"):
        check_store(opened())


def test_a_store_whose_replies_get_lost_passes_the_check(opened: Callable[..., Store], proxy: Proxy) -> None:
    proxy.faults.lost_reply = 0.3
    for _ in range(8):
        check_store(opened())


def test_all_that_a_store_refuses_is_told_at_once(opened: Callable[..., Store], proxy: Proxy) -> None:
    proxy.faults.ignores_conditions, proxy.faults.forbidden = (
        True,
        re.compile("POST"),
    )  # objects are deleted by POST
    told = (
        r"can't serve a run: 2 findings:\n  1\. .*create-once on an exist.*\n  2\. .*at delete.*AccessDenied"
    )
    with pytest.raises(NotReadyError, match=told):
        check_store(opened())


REQUESTS: dict[str, Callable[[Store], object]] = {
    "PUT": lambda store: store.put("data/b", b"small"),
    "PUT .*": lambda store: store.create("data/c", b"small"),
    "HEAD": lambda store: store.put("data/d", b"small", durable=True),
    "HEAD .*": lambda store: store.head("data/a"),
    "GET": lambda store: store.get("data/a"),
    "GET .*list-type": lambda store: store.list("data"),
    "POST": lambda store: store.delete(["data/a"]),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_small_request_that_nobody_answers_is_soon_made_again(
    opened: Callable[..., Store], proxy: Proxy, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    monkeypatch.setattr(s3, "ANSWER_S", 1)
    store = opened()
    store.put("data/a", b"0123")
    proxy.faults.unanswered = re.compile(request_)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(REQUESTS[request_], store)
        try:
            done.result(timeout=60)
        finally:
            proxy.ended.set()
    assert proxy.holds_one.is_set()


def test_a_large_object_may_take_longer_than_an_answer(
    opened: Callable[..., Store], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "ANSWER_S", 1)
    proxy.faults.bytes_per_s = SMALL_BYTES / 3
    opened().put("data/a", bytes(SMALL_BYTES + 1))
    assert proxy.counts["requests"] == 1


def test_checksum_headers_can_be_left_out(opened: Callable[..., Store], proxy: Proxy) -> None:
    proxy.faults.refuses_checksums = True
    with pytest.raises(StoreError, match="fails at put.*request_checksum_calculation"):
        check_store(opened())
    check_store(opened(checksums=False))


@dataclasses.dataclass
class Renewable:
    """A store with keys that the proxy takes for expired until they are asked for again."""

    store: Store
    key: str
    num_asked: int = 0


@pytest.fixture
def renewable(object_server: ObjectServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Renewable:
    settings = object_server.settings(BUCKET, prefix=f"root-{uuid.uuid4().hex[:8]}")
    settings = dataclasses.replace(settings, endpoint_url=proxy.endpoint_url)
    session = object_server.session()
    keys = session.get_credentials()
    found = Renewable(Store(Bucket(settings, session), QUICK), keys.access_key)  # type: ignore[arg-type]
    found.store.put("data/a", b"0")
    frozen = keys.get_frozen_credentials

    def renewed() -> object:
        found.num_asked += 1
        proxy.faults.expired_keys = set()
        return frozen()

    monkeypatch.setattr(keys, "get_frozen_credentials", renewed)
    return found


def test_expired_credentials_are_asked_for_again_before_a_put_fails(
    renewable: Renewable, proxy: Proxy
) -> None:
    for path, body in (("data/a", b"small"), ("data/b", secrets.token_bytes(PART_BYTES + 1))):
        proxy.faults.expired_keys = {renewable.key}
        renewable.store.put(path, body)
        assert renewable.store.get(path) == body
    assert renewable.num_asked == 2


@pytest.mark.parametrize("status", [400, 403])
def test_credentials_are_asked_for_again_where_an_answer_has_no_body_to_say_that_they_expired(
    renewable: Renewable, proxy: Proxy, status: int
) -> None:
    proxy.faults.expired_status = status
    for path, is_there in (("data/a", True), ("data/b", False)):
        proxy.faults.expired_keys = {renewable.key}
        assert renewable.store.exists(path) == is_there
    assert renewable.num_asked == 2


def test_keys_that_others_write_anew_into_the_file_of_credentials_are_read_again(
    object_server: ObjectServer,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    aws_environment: None,
) -> None:
    def write(key: str, secret: str) -> None:
        file.write_text(f"[mine]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    file, good = tmp_path / "credentials", object_server.session().get_credentials()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint_url)
    write("old", "old")
    proxy.faults.expired_keys = {"old"}
    store = Store.open(f"s3://{BUCKET}/root-{uuid.uuid4().hex[:8]}")
    store = store.with_retry({**PATIENT, "retry_timeout": timedelta(seconds=5)})
    write(good.access_key, good.secret_key)
    store.put("data/a", b"x", durable=True)
    assert store.get("data/a") == b"x"


def test_keys_that_expire_are_read_again_in_a_forked_process(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    store.put("data/a", b"0123")
    monkeypatch.setattr("layertap.store._forked", lambda: True)
    proxy.faults.expired_keys = {object_server.session().get_credentials().access_key}
    monkeypatch.setattr(Bucket, "renew", lambda _: setattr(proxy.faults, "expired_keys", set()))
    assert store.get_range("data/a", 1, 2) == b"12"


class Once(set[str]):
    """Holds its items until somebody has found one."""

    def __contains__(self, item: object) -> bool:
        found = super().__contains__(item)
        self.clear()
        return found


@pytest.mark.parametrize("status", [400, 403])
def test_keys_that_expire_between_a_put_and_its_confirmation_cost_nothing(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy, status: int
) -> None:
    store, expired = opened(), Once({object_server.session().get_credentials().access_key})
    proxy.faults.expired_status = status
    proxy.faults.on_stored = lambda _: setattr(proxy.faults, "expired_keys", expired)
    store.put("data/a", b"small", durable=True)
    assert not expired


def test_a_head_that_is_forbidden_is_refused_after_one_more_try(
    opened: Callable[..., Store], proxy: Proxy
) -> None:
    store, proxy.faults.forbidden = opened(), re.compile("HEAD")
    with pytest.raises(StoreRefusedError, match="can't head .*403 Forbidden"):
        store.head("data/a")
    assert proxy.counts["requests"] == 2


def test_credentials_that_stay_expired_are_worth_another_try_later(
    object_server: ObjectServer, opened: Callable[..., Store], proxy: Proxy
) -> None:
    keys = object_server.session().get_credentials()
    proxy.faults.expired_keys = {keys.access_key}
    store = opened().with_retry({**PATIENT, "retry_timeout": timedelta(0)})
    with pytest.raises(StoreError, match="ExpiredToken") as raised:
        store.put("data/a", b"x")
    assert raised.value.retriable


def test_bodies_are_signed_where_they_cross_a_network_without_tls(
    opened: Callable[..., Store], proxy: Proxy
) -> None:
    by_another_name = proxy.endpoint_url.replace("127.0.0.1", "0.0.0.0")  # as if it were another host
    opened(endpoint_url=by_another_name).put("data/a", b"x")
    assert proxy.counts["requests"] > 0 and not proxy.unsigned
    opened(checksums=False).put("data/a", b"x")
    assert not proxy.unsigned
    opened().put("data/a", b"x")
    assert len(proxy.unsigned) == 1


def test_a_private_ca_is_trusted_by_its_file_and_nothing_else_is(
    object_server: ObjectServer, tmp_path: Path
) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    plain = object_server.settings(BUCKET, prefix=f"root-{uuid.uuid4().hex[:8]}")

    with Proxy(object_server.ports.s3, tls=ours.server()).running() as proxy:

        def opened(verify: str | bool) -> Store:
            settings = dataclasses.replace(plain, endpoint_url=proxy.endpoint_url, verify=verify)
            return Store(Bucket(settings, object_server.session()), QUICK)  # type: ignore[arg-type]

        store = opened(str(ours.file))
        check_store(store)
        proxy.unsigned.clear()
        store.put("data/a", b"x")
        assert len(proxy.unsigned) == 1
        wrong = {str(others.file): "the CA file '.*others.pem'", True: "this host's CAs"}
        for verify, by in wrong.items():
            with pytest.raises(StoreRefusedError, match=f"isn't good by {by} .UnknownIssuer.*AWS_CA_BUNDLE"):
                opened(verify).get("data/a")
        (tmp_path / "empty.pem").touch()
        with pytest.raises(StoreRefusedError, match="empty.pem' of the store holds no certificate"):
            opened(str(tmp_path / "empty.pem")).get("data/a")
