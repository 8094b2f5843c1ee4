"""Objects under one root, on a local folder or on S3: put, create once, get, range, list, delete.

obstore does the work without holding the GIL; its errors become layertap's here and nowhere else.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.request import url2pathname

from obstore.store import LocalStore, S3Store

from layertap.checksums import Buffer, Content, checksum, checksum_text, crc64nvme, crc64nvme_of_all
from layertap.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotFoundError,
    StoreRefusedError,
)
from layertap.folder import create_file, make_durable, read_range, temporary_files
from layertap.retries import PATIENT, in_obstore, patiently
from layertap.s3 import Bucket, Clients, S3Settings
from layertap.store_errors import mapped

if TYPE_CHECKING:
    import boto3
    from obstore.store import RetryConfig

__all__ = [
    "Buffer",
    "ObjectInfo",
    "S3Settings",
    "Store",
    "checksum",
    "checksum_text",
    "crc64nvme",
    "crc64nvme_of_all",
]

_T = TypeVar("_T")

PART_BYTES = 32 << 20
"""Size of a part of a multipart upload; 10,000 of them make 320 GB, more than any object of a root."""

PARTS_AT_ONCE = 4

SMALL_BYTES = 1 << 20
"""An object of no more bytes is sent in seconds, or its request is taken for lost and made again."""

PUTS_TO_CONFIRM = 2
"""So often an object is put that the store has otherwise than it was sent."""


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was begun and neither completed nor aborted."""

    path: str
    upload_id: str
    begun_at: datetime


@dataclass(frozen=True)
class ObjectInfo:
    """One object: its path under the root, size in bytes, and the tag that changes with its content."""

    path: str
    size: int
    e_tag: str | None

    modified_at: datetime
    """By the clock of the store."""


class Store:
    """One root. Paths are relative, `/`-separated, and never leave it. Safe to share between threads.

    Every method raises StoreError when the store failed for longer than the retries last, and
    StoreRefusedError when it refuses for good.

    A store travels to spawned processes (pickle) without its secrets: they are asked of the session again.
    obstore's threads don't survive a fork; a forked process can still read ranges.
    """

    def __init__(
        self, root: Path | Bucket, retry: "RetryConfig" = PATIENT, given_up: threading.Event | None = None
    ) -> None:
        self._root = root
        self._retry = retry
        self._given_up = given_up or threading.Event()
        self.uri = str(root)

    @classmethod
    def folder(cls, path: str | Path) -> "Store":
        """A root on a local or shared folder; the first write makes it."""
        return cls(Path(path).expanduser().resolve())

    @classmethod
    def s3(
        cls,
        settings: S3Settings,
        session: "boto3.Session | None" = None,
        reload: "Callable[[], boto3.Session] | None" = None,
    ) -> "Store":
        """A root in a bucket. Credentials come from the session, by default boto3's own, and are renewed.

        Args:
            settings: where the root is.
            session: its credentials.
            reload: makes a session with the credentials of then, once the store takes the old ones no more;
                by default a file of credentials is read again.

        Raises:
            StoreRefusedError: the session has no credentials.
        """
        import boto3

        return cls(Bucket(settings, session or boto3.Session(), reload))

    @classmethod
    def open(cls, uri: str | Path) -> "Store":
        """The root at a path, `file://` or `s3://bucket/prefix`; S3 as boto3's environment describes it.

        Raises:
            StoreRefusedError: another kind of URI, a file on another host, or no credentials.
        """
        text = str(uri)
        if text.startswith("s3://"):
            import boto3

            session = boto3.Session()
            return cls.s3(S3Settings.from_environment(text, session), session)
        if text.startswith("file://"):
            return cls.folder(_path_of(text))
        if "://" in text:
            raise StoreRefusedError(f"{text!r} is neither a path, nor file://, nor s3://bucket/prefix")
        return cls.folder(text)

    def put(self, path: str, data: Buffer, *, durable: bool = False, crc: int | None = None) -> None:
        """Write an object whole, over any older one.

        Args:
            path: where to.
            data: its bytes; they must not change until the call returns.
            durable: return only when the store has said that it has these bytes: the size, and on S3 the
                CRC64NVME; and, on a folder, when they survive a loss of power.
            crc: the CRC64NVME of the bytes, where it is known already.

        Raises:
            IntegrityError: what the store has isn't what was sent, twice.
        """
        view = memoryview(data).cast("B")
        sent = Content(len(view), crc64nvme(view) if crc is None else crc) if durable else None
        self._put(path, lambda: view, lambda: sent, is_small=len(view) <= SMALL_BYTES)

    def put_chunks(self, path: str, chunks: Callable[[], Iterator[bytes]]) -> Content:
        """Write an object whole and durably, as `put`, from pieces that needn't lie in memory together.

        Args:
            path: where to.
            chunks: gives all pieces from the first one on, whenever it is called: once for each try.

        Returns:
            Size and CRC64NVME of the object.
        """
        sent = Content()

        def counted() -> Iterator[bytes]:
            nonlocal sent
            sent = Content()
            for chunk in chunks():
                sent = sent.then(chunk)
                yield chunk

        self._put(path, counted, lambda: sent, is_small=False)
        return sent

    def _put(
        self,
        path: str,
        body: Callable[[], memoryview | Iterator[bytes]],
        sent: Callable[[], Content | None],
        *,
        is_small: bool,
    ) -> None:
        """Put until the store confirms what was sent, or once where that is None."""
        with self._mapped("put", path):
            if isinstance(self._root, Path):
                self._root.mkdir(parents=True, exist_ok=True)
            sizes: Any = {"chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
            for _ in range(PUTS_TO_CONFIRM):
                self._patiently(lambda: self._for(is_small).put(path, body(), **sizes))
                if (whole := sent()) is None or (found := self._stored(path)).confirms(whole):
                    return
        raise IntegrityError(
            f"{self.uri}/{path} holds {found} after {whole} were put, {PUTS_TO_CONFIRM} times: the store, or "
            "the way to it, damages what is written"
        )

    def _stored(self, path: str) -> Content:
        """What the store has of an object; on a folder it survives a loss of power then."""
        if isinstance(self._root, Path):
            make_durable(self._root, self._root / path)
            return Content((self._root / path).stat().st_size, None)
        bucket = self._root

        def ask() -> Content:
            with self._mapped("confirm", path):
                return bucket.stored(path)

        return self._patiently(ask)

    def create(self, path: str, data: Buffer) -> None:
        """Write an object unless there is one: of all who try, one succeeds. Durable and confirmed.

        Raises:
            AlreadyExistsError: somebody wrote it first, perhaps an earlier try of the same call, and then
                nothing was confirmed.
            IntegrityError: what the store has isn't what was sent, nor is it after the object was put again.
        """
        if isinstance(self._root, Path):
            with self._mapped("create", path):
                try:
                    return create_file(self._root, self._root / path, data)
                except FileExistsError as error:
                    raise AlreadyExistsError(f"{self.uri}/{path} exists already") from error
        view = memoryview(data).cast("B")
        is_small = len(view) <= SMALL_BYTES
        with self._mapped("create", path):
            self._patiently(lambda: self._for(is_small).put(path, view, mode="create"))
            is_confirmed = self._stored(path).confirms(Content(len(view), crc64nvme(view)))
        if not is_confirmed:
            # Its own bytes go over it. If it were deleted, another might create it, though somebody has read
            # it and goes by it: a shard would have two outcomes.
            self.put(path, view, durable=True)

    def get(self, path: str) -> bytes:
        """The object's bytes.

        Raises:
            NotFoundError: there is no such object.
        """
        with self._mapped("get", path):
            return self._patiently(lambda: self._objects.get(path).bytes().to_bytes())

    def get_range(self, path: str, offset: int, nbytes: int) -> Buffer:
        """`nbytes` bytes of the object from `offset`, in one request; read-only.

        Raises:
            NotFoundError: there is no such object.
            IntegrityError: the object ends before.
        """
        try:
            with self._mapped("get a range of", path):
                data = self._read_range(path, offset, nbytes)
        except IntegrityError:  # it ends before the first of them
            data = b""
        if len(data) != nbytes:
            raise IntegrityError(
                f"{self.uri}/{path} is too short: bytes {offset} to {offset + nbytes} asked, "
                f"{len(data)} of {nbytes} there"
            )
        return data

    def head(self, path: str) -> ObjectInfo:
        """Size and e-tag of the object.

        Raises:
            NotFoundError: there is no such object.
        """
        with self._mapped("head", path):
            meta = self._patiently(lambda: self._objects.head(path))
        return _info({**meta, "path": path})

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            self.head(path)
        except NotFoundError:
            return False
        return True

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders in the folder `prefix`, ascending; nothing below them is listed."""
        with self._mapped("list", prefix):
            if self._is_missing:
                return []
            found = self._patiently(lambda: self._objects.list_with_delimiter(prefix))["common_prefixes"]
        return sorted(path.rpartition("/")[2] for path in found)

    def names(self, prefix: str) -> list[str]:
        """Names of the objects in the folder `prefix`, ascending; nothing below its folders is listed."""
        with self._mapped("list", prefix):
            if self._is_missing:
                return []
            found = self._patiently(lambda: self._objects.list_with_delimiter(prefix))["objects"]
        return sorted(meta["path"].rpartition("/")[2] for meta in found)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects in the folder `prefix` and below, by path; empty if there is no such folder."""
        with self._mapped("list", prefix):
            if self._is_missing:
                return []
            found = self._patiently(lambda: [meta for page in self._objects.list(prefix) for meta in page])
        return sorted(map(_info, found), key=lambda o: o.path)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete the objects; those that are missing are no error."""
        for path in paths:
            _check_path(path)
        if not paths:
            return
        with self._mapped("delete", paths[0]):
            if isinstance(self._root, Path):
                for path in paths:
                    (self._root / path).unlink(missing_ok=True)
            else:
                self._patiently(lambda: self._for(len(paths) == 1).delete(paths))

    def open_uploads(self) -> Sequence[Upload]:
        """Multipart uploads under this root that nobody has ended, by path; none on a folder."""
        if isinstance(self._root, Path):
            return []
        with self._mapped("list the uploads of", "data"):
            return [Upload(*found) for found in self._root.open_uploads()]

    def abort(self, upload: Upload) -> None:
        """End a multipart upload and free its parts."""
        assert not isinstance(self._root, Path)
        with self._mapped("abort the upload of", upload.path):
            self._root.abort(upload.path, upload.upload_id)

    def temporary_files(self) -> Sequence[ObjectInfo]:
        """Files that writers who died left on a folder, under names that no list shows; none on S3."""
        if not isinstance(self._root, Path) or self._is_missing:
            return []
        found = []
        with mapped("list the temporary files of", self.uri):
            for path, info in temporary_files(self._root):
                modified_at = datetime.fromtimestamp(info.st_mtime, UTC)
                name = path.relative_to(self._root).as_posix()
                found.append(ObjectInfo(name, info.st_size, None, modified_at))
        return sorted(found, key=lambda o: o.path)

    def local_path(self, path: str) -> Path | None:
        """The file behind an object on a folder; None on S3."""
        _check_path(path)
        return self._root / path if isinstance(self._root, Path) else None

    def with_retry(self, retry: "RetryConfig") -> "Store":
        """The same root, with another patience."""
        return Store(self._root, retry, self._given_up)

    def until(self, given_up: threading.Event) -> "Store":
        """The same root; once the event is set, what fails is tried again for seconds only."""
        return Store(self._root, self._retry, given_up)

    @property
    def _is_missing(self) -> bool:
        return isinstance(self._root, Path) and not self._root.exists()

    @cached_property
    def _opened(self) -> LocalStore | Clients:
        if self._is_missing:
            raise FileNotFoundError(f"there is no folder {self._root}")
        if isinstance(self._root, Path):
            return LocalStore(self._root)
        return self._root.open(in_obstore(self._retry))

    @property
    def _objects(self) -> LocalStore | S3Store:
        return self._for(is_small=True)

    def _for(self, is_small: bool) -> LocalStore | S3Store:
        """What does a small request, which is answered in seconds, or a large one, which may take minutes."""
        if _forked():
            raise StoreRefusedError(
                f"{self.uri} was in use when this process was forked, and its threads didn't survive that: "
                "start processes with the multiprocessing context 'spawn'"
            )
        opened = self._opened
        if isinstance(opened, Clients):
            return opened.prompt if is_small else opened.bulk
        return opened

    def _patiently(self, operation: Callable[[], _T]) -> _T:
        at_most = self._retry["retry_timeout"]
        return patiently(operation, at_most, renew=self._reopen, given_up=self._given_up)

    def _reopen(self) -> None:
        """Let the next request ask for credentials anew: obstore keeps those it has as long as they last."""
        if isinstance(self._root, Bucket):
            self._root.renew()
        self.__dict__.pop("_opened", None)

    def _read_range(self, path: str, offset: int, nbytes: int) -> Buffer:
        if isinstance(self._root, Path):
            with (self._root / path).open("rb") as file:
                return read_range(file, offset, nbytes)
        bucket = self._root

        def read() -> Buffer:
            if not _forked():
                return memoryview(self._objects.get_range(path, start=offset, length=nbytes))
            with self._mapped("get a range of", path):
                return bucket.range_after_fork(path, offset, nbytes)

        return self._patiently(read)

    @contextlib.contextmanager
    def _mapped(self, verb: str, path: str) -> Iterator[None]:
        _check_path(path)
        with mapped(verb, f"{self.uri}/{path}"):
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        return (Store, (self._root, self._retry))

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"


_first_pid: int | None = None


def _forked() -> bool:
    """Whether obstore's threads belong to a parent of this process; calls into it would never return."""
    global _first_pid
    if _first_pid is None:
        _first_pid = os.getpid()
    return _first_pid != os.getpid()


def _path_of(uri: str) -> str:
    """The path of a `file://` URI; `#` and `?` belong to it."""
    host, slash, path = uri.removeprefix("file://").partition("/")
    if host not in ("", "localhost") or not slash:
        raise StoreRefusedError(f"{uri!r} names the host {host!r}, not a path here: write file:///path")
    return url2pathname(slash + path)


def _info(meta: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"], meta["last_modified"])


def _check_path(path: str) -> None:
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise StoreRefusedError(f"path {path!r} is not a plain relative path; it could leave the root")
