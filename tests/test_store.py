"""Objects on a folder and on a real S3 server."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import numpy as np
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st
from obstore import exceptions as obstore_errors

from layertap.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    StoreError,
    StoreRefusedError,
)
from layertap.object_server import ObjectServer
from layertap.retries import PATIENT
from layertap.s3 import Bucket, S3Settings
from layertap.store import PART_BYTES, Store, checksum, crc64nvme, crc64nvme_of_all
from layertap.store_check import BRIEF, check_store
from layertap.store_errors import mapped
from tests.processes import in_fresh_process


def test_an_object_comes_back_whole_and_in_ranges(store: Store) -> None:
    data = os.urandom(100_000)
    store.put("a/b.bin", memoryview(bytearray(data)))
    assert store.get("a/b.bin") == data
    assert store.get_range("a/b.bin", 777, 5_000) == data[777:5_777]
    assert store.head("a/b.bin").size == len(data)
    assert store.exists("a/b.bin")
    assert not store.exists("a/c.bin")


def test_a_put_replaces_the_object_and_its_tag(store: Store) -> None:
    store.put("x", b"one")
    before = store.head("x").e_tag
    store.put("x", b"two", durable=True)
    assert store.get("x") == b"two"
    assert store.head("x").e_tag != before


def test_an_object_of_several_parts_is_put_whole(store: Store) -> None:
    data = np.random.default_rng(0).integers(0, 256, 2 * PART_BYTES + 12_345, dtype=np.uint8)
    store.put("big", data.data)
    assert checksum(store.get("big")) == checksum(data.data)


def test_lists_are_sorted_and_folders_are_not_looked_into(store: Store) -> None:
    assert store.list("plans") == []
    assert store.folders("plans") == []
    for path in ("plans/p2/a", "plans/p1/state/b", "plans/p1/state/a", "plans-of-others/c"):
        store.put(path, b"12345")
    assert [(o.path, o.size) for o in store.list("plans/p1")] == [
        ("plans/p1/state/a", 5),
        ("plans/p1/state/b", 5),
    ]
    assert store.folders("plans") == ["p1", "p2"]


def test_a_missing_object_is_named(store: Store) -> None:
    for call in (store.get, store.head, lambda path: store.get_range(path, 0, 1)):
        with pytest.raises(NotFoundError, match=f"{store.uri}/not/there"):
            call("not/there")


def test_deleting_what_is_missing_is_no_error(store: Store) -> None:
    store.put("x", b"1")
    store.delete([])
    store.delete(["never", "x"])
    assert not store.exists("x")


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_range_beyond_the_end_is_an_integrity_error(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_forked: bool
) -> None:
    store.put("short", b"0123456789")
    monkeypatch.setattr("layertap.store._forked", lambda: is_forked)
    with pytest.raises(IntegrityError, match=r"short is too short: bytes 8 to 12 asked, 2 of 4 there"):
        store.get_range("short", 8, 4)
    with pytest.raises(IntegrityError, match="0 of 4 there"):
        store.get_range("short", 20, 4)


def test_a_range_is_whole_though_a_read_ends_early(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of Linux does below 2 GiB: a row of a 27B target may be longer."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, nbytes, at: pread(file, min(nbytes, 100), at))
    folder_store.put("x", data := os.urandom(1_000))
    assert folder_store.get_range("x", 10, 900) == data[10:910]


def test_of_sixteen_creators_one_wins(store: Store) -> None:
    for attempt in range(2):
        barrier, won = threading.Barrier(16), []

        def create(
            name: bytes, attempt: int = attempt, won: list[bytes] = won, barrier: Any = barrier
        ) -> None:
            barrier.wait()
            try:
                store.create(f"state/claim-{attempt}", name)
                won.append(name)
            except AlreadyExistsError:
                pass

        threads = [threading.Thread(target=create, args=(b"%d" % i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [store.get(f"state/claim-{attempt}")] == won


def test_thirty_two_threads_share_a_store(store: Store) -> None:
    def work(k: int) -> bool:
        body = bytes([k]) * (1000 + k)
        for path in (f"data/{k}-{i}" for i in range(4)):
            store.put(path, body)
            if store.get(path) != body or bytes(store.get_range(path, 10, k)) != body[10 : 10 + k]:
                return False
        return True

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(1, 33)))
    assert len(store.list("data")) == 32 * 4


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//b", "", ".", "a/"])
def test_paths_never_leave_the_root(store: Store, path: str) -> None:
    calls = (
        lambda: store.put(path, b"x"),
        lambda: store.create(path, b"x"),
        lambda: store.get(path),
        lambda: store.get_range(path, 0, 1),
        lambda: store.list(path),
        lambda: store.folders(path),
        lambda: store.delete([path]),
        lambda: store.local_path(path),
    )
    for call in calls:
        with pytest.raises(StoreRefusedError, match="could leave the root"):
            call()


def test_two_roots_in_one_bucket_are_apart(object_server: ObjectServer, s3_store: Store) -> None:
    other = Store.s3(
        S3Settings(**{**vars(s3_store._root.settings), "prefix": "/other/"}), object_server.session()
    )
    s3_store.put("x", b"1")
    assert not other.exists("x")
    assert other.uri == "s3://layertap-tests/other"


def test_the_root_of_a_reader_is_not_made(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "typo")
    assert store.list("versions") == []
    assert not store.exists("layertap.json")
    assert not (tmp_path / "typo").exists()


class _SyncLog:
    """Notes what is synced and when names appear, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        fsync, link = os.fsync, os.link

        def noted_fsync(descriptor: int) -> None:
            self.events.append(
                f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.partition('#')[0]}"
            )
            fsync(descriptor)

        def noted_link(source: Path, target: Path) -> None:
            self.events.append(f"appears {target.name}")
            link(source, target)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "link", noted_link)


def test_data_and_every_folder_above_are_synced(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _SyncLog(monkeypatch)
    folder_store.put("plans/p/data/x", b"1", durable=True)
    assert log.events == ["sync x", "sync data", "sync p", "sync plans", "sync root"]


class HalfWritten:
    """What a disk does that loses the end of a file, and says nothing, as often as told."""

    def __init__(self, objects: Any, num_times: int) -> None:
        self._objects = objects
        self._num_left = num_times

    def put(self, path: str, data: Any, **options: Any) -> None:
        self._num_left -= 1
        self._objects.put(path, data if self._num_left < 0 else data[: len(data) // 2], **options)


def test_a_file_that_lost_its_end_is_written_again_and_then_named(folder_store: Store) -> None:
    folder_store.put("x", b"1")
    honest = folder_store._opened
    folder_store.__dict__["_opened"] = HalfWritten(honest, num_times=1)
    folder_store.put("x", b"0123", durable=True)
    assert folder_store.get_range("x", 0, 4) == b"0123"
    folder_store.__dict__["_opened"] = HalfWritten(honest, num_times=2)
    with pytest.raises(
        IntegrityError, match="x holds 2 bytes after 4 bytes of crc64nvme:.* were put, 2 times"
    ):
        folder_store.put("x", b"0123", durable=True)


def test_a_record_is_synced_before_its_name_appears(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _SyncLog(monkeypatch)
    folder_store.create("state/00000.outcome", b"{}")
    assert log.events == ["sync 00000.outcome", "appears 00000.outcome", "sync state", "sync root"]


def test_a_killed_writer_leaves_nothing_visible(store: Store) -> None:
    """The writer dies again and again in the midst of puts and creates; what is there is always whole."""
    script = (
        "import sys; from layertap.store import Store; s = Store.open(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "for i in range(10**6): s.put(f'data/{i}', b'7' * 3_000_000); s.create(f'made/{i}', b'7' * 3_000_000)"
    )
    for round_ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", script, store.uri], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.03 + 0.04 * round_)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        found = store.list("data") + store.list("made")
        assert {o.size for o in found} <= {3_000_000}
        store.delete([o.path for o in store.list("made")])


def test_check_passes_on_a_good_store_and_leaves_nothing(store: Store) -> None:
    check_store(store)
    assert store.list("check") == []


def test_check_names_what_a_store_cannot_do(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrites(self: Store, path: str, data: bytes) -> None:
        self.put(path, data)

    monkeypatch.setattr(Store, "create", overwrites)
    with pytest.raises(StoreRefusedError, match="fails at create-once on an existing object"):
        check_store(folder_store)


def _with(store: Store, server: ObjectServer, **changes: Any) -> Store:
    assert isinstance(store._root, Bucket)
    return Store.s3(S3Settings(**{**vars(store._root.settings), **changes}), server.session())


def test_a_missing_bucket_is_refused_at_once(s3_store: Store, object_server: ObjectServer) -> None:
    nowhere = _with(s3_store, object_server, bucket="no-such-bucket")
    with pytest.raises(StoreRefusedError, match=r"fails at put: .*NoSuchBucket"):
        check_store(nowhere)
    with pytest.raises(StoreRefusedError, match="NoSuchBucket"):
        nowhere.list("versions")


def test_wrong_keys_are_refused_and_never_shown(s3_store: Store) -> None:
    session = boto3.Session(aws_access_key_id="nobody", aws_secret_access_key="hush-hush")
    assert isinstance(s3_store._root, Bucket)
    stranger = Store.s3(s3_store._root.settings, session)
    for call in (lambda: stranger.put("x", b""), lambda: stranger.get("x"), lambda: stranger.list("x")):
        with pytest.raises(StoreRefusedError, match="InvalidAccessKeyId") as caught:
            call()
        assert "hush-hush" not in f"{caught.value!r} {stranger!r}"


def test_a_store_that_is_away_is_worth_another_try(s3_store: Store, object_server: ObjectServer) -> None:
    away = _with(s3_store, object_server, endpoint_url="http://127.0.0.1:9")
    away._retry = {**BRIEF, "retry_timeout": timedelta(0)}
    with pytest.raises(StoreError, match="can't get s3://") as caught:
        away.get("x")
    assert caught.value.retriable


def test_a_check_of_a_store_that_is_away_says_so_and_that_it_may_come_back(
    s3_store: Store, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layertap.store_check.BRIEF", {**BRIEF, "retry_timeout": timedelta(milliseconds=1)})
    with pytest.raises(StoreError, match=r"the store s3://\S+ fails at put: can't put") as caught:
        check_store(_with(s3_store, object_server, endpoint_url="http://127.0.0.1:9"))
    assert type(caught.value) is StoreError
    assert caught.value.retriable


def test_a_host_that_no_name_server_knows_is_refused_by_name(
    s3_store: Store, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layertap.store_check.BRIEF", {**BRIEF, "retry_timeout": timedelta(milliseconds=1)})
    mistyped = _with(s3_store, object_server, endpoint_url="http://object-store.invalid:8333")
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr("socket.getaddrinfo", Mock(side_effect=unknown))  # whatever this one says
    with pytest.raises(StoreRefusedError, match=r"No name server knows object-store\.invalid: correct"):
        check_store(mistyped)
    unsure = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    monkeypatch.setattr("socket.getaddrinfo", Mock(side_effect=unsure))
    with pytest.raises(StoreError) as caught:
        check_store(mistyped)
    assert type(caught.value) is StoreError


class _Restarting(BaseHTTPRequestHandler):
    """A store that answers the first 100 requests with 503."""

    num_requests = 0

    def do_GET(self) -> None:
        type(self).num_requests += 1
        is_up = type(self).num_requests > 100
        self.send_response(200 if is_up else 503)
        for name, value in (
            ("Content-Length", "4"),
            ("ETag", "x"),
            ("Last-Modified", formatdate(usegmt=True)),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"1234" if is_up else b"away")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("retry", [PATIENT, BRIEF], ids=["patient", "brief"])
def test_retries_end_by_time_not_by_number(s3_store: Store, object_server: ObjectServer, retry: Any) -> None:
    _Restarting.num_requests = 0
    with HTTPServer(("127.0.0.1", 0), _Restarting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        there = _with(s3_store, object_server, endpoint_url=f"http://127.0.0.1:{server.server_port}")
        soon = {name: timedelta(milliseconds=1) for name in ("init_backoff", "max_backoff")}
        there._retry = {**retry, "backoff": {"base": 2, **soon}}
        try:
            assert there.get("x") == b"1234"
        finally:
            server.shutdown()
            thread.join()


def test_no_credentials_is_an_error_that_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreRefusedError, match="no credentials for s3://bucket/x: set AWS_PROFILE"):
        Store.open("s3://bucket/x")


def test_credentials_that_expire_are_asked_for_again(
    s3_store: Store, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import layertap.s3

    monkeypatch.setattr(layertap.s3, "CREDENTIALS_TTL", timedelta(0))
    session = object_server.session()
    credentials = session.get_credentials()
    asked, frozen = Counter[str](), credentials.get_frozen_credentials

    def counted() -> Any:
        asked["times"] += 1
        return frozen()

    monkeypatch.setattr(credentials, "get_frozen_credentials", counted)
    assert isinstance(s3_store._root, Bucket)
    store = Store.s3(s3_store._root.settings, session)
    for i in range(3):
        store.put(f"x{i}", b"1")
        time.sleep(0.2)
    assert asked["times"] >= 3


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (obstore_errors.GenericError("507 Insufficient Storage"), StoreRefusedError),
        (obstore_errors.GenericError("… No space left on device (os error 28)"), StoreRefusedError),
        (obstore_errors.PermissionDeniedError("<Code>ExpiredToken</Code>"), StoreError),
        (obstore_errors.GenericError("400 <Code>XMinioAdminBucketQuotaExceeded</Code>"), StoreRefusedError),
        (obstore_errors.GenericError("503 <Code>SlowDown</Code>"), StoreError),
        (FileNotFoundError("404 <Code>NoSuchBucket</Code>"), StoreRefusedError),
        (FileNotFoundError("404 <Code>NoSuchKey</Code>"), NotFoundError),
        (OSError(28, "No space left on device"), StoreRefusedError),
        (OSError(5, "Input/output error"), StoreError),
    ],
)
def test_errors_say_whether_another_try_helps(error: Exception, becomes: type[Exception]) -> None:
    with pytest.raises(StoreError, match="can't put s3://b/x: ") as caught, mapped("put", "s3://b/x"):
        raise error
    assert type(caught.value) is becomes


KEY_ID = "AKIAFAKEFAKEFAKEFAKE"
SIGNED_BODY = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SignatureDoesNotMatch</Code>'
    f"<AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId><CanonicalRequest>PUT\n/b/x\n\n"
    f"authorization:Credential={KEY_ID}/20260101</CanonicalRequest></Error>"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            obstore_errors.PermissionDeniedError(
                f"Error performing PUT http://h/b/x in 1.4ms - 403 Forbidden: {SIGNED_BODY}\n\n"
                f"Debug source:\nPermissionDenied {{ body: {SIGNED_BODY!r} }}"
            ),
            "Error performing PUT http://h/b/x in 1.4ms - 403 Forbidden [SignatureDoesNotMatch]",
        ),
        (
            ClientError(
                {
                    "Error": {
                        "Code": "SignatureDoesNotMatch",
                        "Message": f"The signature differs. The key was {KEY_ID}: {SIGNED_BODY}",
                    }
                },
                "PutObject",
            ),
            "An error occurred (SignatureDoesNotMatch) when calling the PutObject operation: "
            "The signature differs [SignatureDoesNotMatch]",
        ),
        (obstore_errors.GenericError(SIGNED_BODY), "GenericError [SignatureDoesNotMatch]"),
    ],
    ids=["obstore", "boto3", "only a body"],
)
def test_what_a_store_answers_is_never_in_a_traceback(error: Exception, said: str) -> None:
    with pytest.raises(StoreRefusedError) as caught, mapped("put", "s3://b/x"):
        raise error
    assert str(caught.value) == f"can't put s3://b/x: {said}"
    recorded = "".join(traceback.format_exception(caught.value))
    assert KEY_ID not in recorded
    assert "CanonicalRequest" not in recorded


def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreRefusedError, match="can't put"):
        Store.open(tmp_path / "file" / "root").put("x", b"1")


def test_uris_open_what_they_name(tmp_path: Path, s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(f"file://{tmp_path}/a%20b").put("x", b"folder")
    assert (tmp_path / "a b" / "x").read_bytes() == b"folder"
    s3_store.put("x", b"bucket")
    reopened = Store.open(s3_store.uri)
    assert reopened.uri == s3_store.uri
    assert reopened.get("x") == b"bucket"
    with pytest.raises(StoreRefusedError, match="'gs://b/x' is neither a path"):
        Store.open("gs://b/x")


def test_what_looks_like_a_query_or_fragment_is_part_of_the_root(tmp_path: Path, s3_store: Store) -> None:
    for name in ("run#1", "run#2", "run?1", "run"):
        Store.open(f"{s3_store.uri}/{name}").put("x", name.encode())
        Store.open(f"file://{tmp_path}/{name}").put("x", name.encode())
    for name in ("run#1", "run#2", "run?1", "run"):
        assert s3_store.get(f"{name}/x") == (tmp_path / name / "x").read_bytes() == name.encode()
        assert Store.open(f"{s3_store.uri}/{name}").uri == f"{s3_store.uri}/{name}"


def test_a_file_uri_of_another_host_is_refused(tmp_path: Path) -> None:
    Store.open(f"file://localhost{tmp_path}/a").put("x", b"1")
    assert (tmp_path / "a" / "x").exists()
    with pytest.raises(StoreRefusedError, match="names the host 'data', not a path here: write file:///path"):
        Store.open("file://data/x")


def test_settings_follow_boto3s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    on_aws = S3Settings.from_environment("s3://b/p/", boto3.Session(region_name="eu-west-1"))
    assert on_aws == S3Settings(bucket="b", prefix="p", region="eu-west-1", path_style=False)
    assert S3Settings.from_environment("s3://dotted.name", boto3.Session()).path_style

    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://10.0.0.1:9000")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/ca.pem")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    own = S3Settings.from_environment("s3://b", boto3.Session())
    assert (own.endpoint_url, own.path_style) == ("https://10.0.0.1:9000", True)
    assert (own.verify, own.checksums) == ("/ca.pem", False)


def test_uploads_without_a_checksum_header_work(s3_store: Store, object_server: ObjectServer) -> None:
    plain = _with(s3_store, object_server, checksums=False)
    plain.put("x", b"1")
    assert s3_store.get("x") == b"1"


def test_an_unreadable_ca_is_named(s3_store: Store, object_server: ObjectServer) -> None:
    with pytest.raises(StoreRefusedError, match=r"CA file '/no/ca\.pem' of the store can't be read"):
        _with(s3_store, object_server, verify="/no/ca.pem").get("x")


def test_a_store_travels_to_another_process_without_its_secret(
    store: Store, object_server: ObjectServer
) -> None:
    store.put("x", b"1")
    data = pickle.dumps(store)
    assert object_server.environment()["AWS_SECRET_ACCESS_KEY"].encode() not in data
    assert pickle.loads(data).get("x") == b"1"
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(store.get, ("x",)) == b"1"


def test_keys_given_in_code_are_not_pickled(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody else")
    with pytest.raises(StoreRefusedError, match="opened with keys given in code"):
        pickle.dumps(s3_store)


def test_a_forked_process_reads_ranges_and_is_refused_the_rest(store: Store) -> None:
    in_fresh_process(_read_in_a_fork, store)


def _read_in_a_fork(store: Store) -> None:
    store.put("x", b"0123456789")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = store.get_range("x", 2, 3)
            try:
                store.put("y", b"")
            except StoreRefusedError as error:
                answer += str(error).encode()
        except BaseException as error:
            answer = repr(error).encode()
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    assert answer.startswith(b"234")
    assert b"multiprocessing context 'spawn'" in answer


def test_checksums_are_those_of_s3() -> None:
    assert checksum(b"123456789") == "crc64nvme:ae8b14860a799888"
    assert checksum(memoryview(bytearray(b"123456789"))) == "crc64nvme:ae8b14860a799888"


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_the_checksum_of_a_whole_follows_from_those_of_its_parts(parts: list[bytes]) -> None:
    assert crc64nvme_of_all((crc64nvme(part), len(part)) for part in parts) == crc64nvme(b"".join(parts))
