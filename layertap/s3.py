"""How a bucket is reached: its settings, credentials from a boto3 session, and the clients made of both."""

import logging
import os
import re
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import S3Store

from layertap.checksums import Content
from layertap.errors import StoreRefusedError

if TYPE_CHECKING:
    import boto3
    from obstore.store import ClientConfig, RetryConfig

DEFAULT_REGION = "us-east-1"

log = logging.getLogger(__name__)

BAD_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
"""In what obstore says of a failed handshake: UnknownIssuer, Expired, NotValidForName…"""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

CREDENTIALS_TTL = timedelta(minutes=10)
"""Credentials are asked for again this often; botocore renews them while they have ten minutes left."""

RENEW_S = 10.0
"""Credentials are read anew no more often: each thread whose request is refused asks for it."""

CONNECT_S = 5
ANSWER_S = 10
"""Seconds in which a store begins to answer, and goes on: a lane whose claim isn't beaten for 30 is taken for
dead, so that a request which nobody answers must be given up before."""

BULK_S = 300
"""Seconds that a request takes at most, such as the upload of a part over a slow network."""


class Clients(NamedTuple):
    """Obstore's clients of one bucket."""

    prompt: S3Store
    """Waits seconds for an answer."""

    bulk: S3Store
    """Waits minutes: for large bodies, whose time counts as the answer's, and whatever keeps a store busy."""


@dataclass(frozen=True, kw_only=True)
class S3Settings:
    """Where a root lies on S3 and how the store is spoken to; no secrets."""

    bucket: str

    prefix: str = ""
    """Keys of the root start with it and a slash."""

    endpoint_url: str | None = None
    """Address of an S3-compatible store; None is AWS."""

    region: str | None = None
    """None takes the session's region, else us-east-1."""

    path_style: bool = True
    """`endpoint/bucket/key` instead of `bucket.endpoint/key`."""

    verify: bool | str = True
    """Whether TLS certificates are checked, or the PEM file of a private CA."""

    checksums: bool = True
    """Whether uploads carry a CRC64NVME for the store to check; some S3-compatible stores refuse it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", self.prefix.strip("/"))

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @classmethod
    def from_environment(cls, uri: str, session: "boto3.Session") -> "S3Settings":
        """Settings for `s3://bucket/prefix` as boto3 resolves them from its environment.

        Everything behind the bucket's slash is the prefix, `#`, `?` and `%` included.
        """
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        meta: Any = session.client("s3", region_name=session.region_name or DEFAULT_REGION).meta
        on_aws = (urlsplit(meta.endpoint_url).hostname or "").endswith(
            (".amazonaws.com", ".amazonaws.com.cn")
        )
        style = (meta.config.s3 or {}).get("addressing_style")
        return cls(
            bucket=bucket,
            prefix=prefix,
            endpoint_url=None if on_aws else meta.endpoint_url,
            region=session.region_name,
            path_style=style == "path" or (style != "virtual" and (not on_aws or "." in bucket)),
            verify=session._session.get_config_variable("ca_bundle") or True,
            checksums=meta.config.request_checksum_calculation != "when_required",
        )


class Bucket:
    """A bucket and the session that opens it; pickled without secrets.

    Args:
        settings: where it is.
        session: its credentials.
        reload: makes a session with the credentials of then, where others keep and replace them.

    Raises:
        StoreRefusedError: the session has no credentials.
    """

    def __init__(
        self,
        settings: S3Settings,
        session: "boto3.Session",
        reload: "Callable[[], boto3.Session] | None" = None,
    ) -> None:
        self.settings = settings
        self.session = self._with_credentials(session)
        self._reload = reload or self._read_file_again
        self._renewed_at = -RENEW_S
        self._clients: dict[tuple[int, int], Any] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._tells_sizes_alone = False

    def _with_credentials(self, session: "boto3.Session") -> "boto3.Session":
        if session.get_credentials() is None:
            raise StoreRefusedError(
                f"no credentials for {self.settings.uri}: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or give a boto3 session that has some; a root in the stack of "
                "`layertap up` is reached with --state FOLDER"
            )
        return session

    def renew(self) -> None:
        """Get credentials anew, for others may have replaced them; if there are none, the old ones stay."""
        with self._lock:
            if time.monotonic() - self._renewed_at < RENEW_S:
                return
            self._renewed_at = time.monotonic()
            try:
                self.session = self._with_credentials(self._reload())
            except Exception as error:  # whatever it is, the old ones are no worse for it
                log.warning("the credentials of %s can't be loaded anew: %s", self, error)
            self._clients.clear()

    def _read_file_again(self) -> "boto3.Session":
        """A session reads a file of credentials once."""
        credentials: Any = self.session.get_credentials()
        if credentials.method not in ("shared-credentials-file", "config-file"):
            return self.session
        import boto3

        profile, region = self.session._session.profile, self.session.region_name
        return boto3.Session(profile_name=profile, region_name=region)

    @property
    def _lock(self) -> threading.Lock:
        """This process's own: one that was held at a fork stays so."""
        return self._locks.setdefault(os.getpid(), threading.Lock())

    @property
    def _region(self) -> str:
        return self.settings.region or self.session.region_name or DEFAULT_REGION

    def open(self, retry: "RetryConfig") -> Clients:
        """Obstore's clients, with credentials that refresh."""
        from obstore.auth.boto3 import Boto3CredentialProvider

        settings = self.settings
        # SHA-256 takes half a CPU second a GB
        config: dict[str, Any] = {"unsigned_payload": _is_protected(settings)}
        if settings.checksums:
            config["checksum_algorithm"] = "CRC64NVME"
        if settings.endpoint_url:
            # the most specific of obstore's names for it: any other gives way to the environment
            config["aws_endpoint_url_s3"] = _endpoint(settings.endpoint_url, settings)
        opened = partial(
            S3Store,
            settings.bucket,
            prefix=settings.prefix or None,
            region=self._region,
            virtual_hosted_style_request=not settings.path_style,
            credential_provider=Boto3CredentialProvider(self.session, ttl=CREDENTIALS_TTL),
            **config,
        )
        bulk = _client_options(settings)
        prompt: ClientConfig = {**bulk, "read_timeout": f"{ANSWER_S}s"}
        if (settings.endpoint_url or "").startswith("https://"):
            once: RetryConfig = {**retry, "max_retries": 0}
            _refuse_bad_certificate(settings, opened(client_options=prompt, retry_config=once))
        return Clients(*(opened(client_options=options, retry_config=retry) for options in (prompt, bulk)))

    def open_uploads(self) -> Iterator[tuple[str, str, datetime]]:
        """Path, id and time of the root's multipart uploads that are neither completed nor aborted."""
        prefix = f"{self.settings.prefix}/" if self.settings.prefix else ""
        pages = self._client_of_process().get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=self.settings.bucket, Prefix=prefix):
            for upload in page.get("Uploads", []):
                yield upload["Key"].removeprefix(prefix), upload["UploadId"], upload["Initiated"]

    def abort(self, path: str, upload_id: str) -> None:
        """Abort a multipart upload, unless it has ended meanwhile."""
        key, client = f"{self.settings.prefix}/{path}".lstrip("/"), self._client_of_process()
        with suppress(client.exceptions.NoSuchUpload):
            client.abort_multipart_upload(Bucket=self.settings.bucket, Key=key, UploadId=upload_id)

    def stored(self, path: str) -> Content:
        """What the store says it has of an object, from its head alone; asked once."""
        key = f"{self.settings.prefix}/{path}".lstrip("/")
        client = self._client_of_process(max_tries=1)
        answer = client.head_object(Bucket=self.settings.bucket, Key=key, ChecksumMode="ENABLED")
        text = answer.get("ChecksumCRC64NVME")
        if text is None or answer.get("ChecksumType") == "COMPOSITE":
            if not self._tells_sizes_alone:
                log.warning("%s keeps no CRC64NVME of objects: after a put only sizes are compared", self)
            self._tells_sizes_alone = True
            return Content(answer["ContentLength"], None)
        return Content(answer["ContentLength"], int.from_bytes(b64decode(text), "big"))

    def range_after_fork(self, path: str, offset: int, nbytes: int) -> bytes:
        """A range through boto3, for a forked process: there obstore waits for threads that do not exist.

        Asked once: boto3's own retries end where an answer's body begins.
        """
        key = f"{self.settings.prefix}/{path}".lstrip("/")
        wanted = f"bytes={offset}-{offset + nbytes - 1}"
        client = self._client_of_process(max_tries=1)
        answer = client.get_object(Bucket=self.settings.bucket, Key=key, Range=wanted)
        data: bytes = answer["Body"].read()
        return data

    def _client_of_process(self, max_tries: int = 10) -> Any:
        from botocore.config import Config

        settings, pid = self.settings, os.getpid()
        style: Any = {"addressing_style": "path" if settings.path_style else "virtual"}
        timeouts: Any = {"connect_timeout": CONNECT_S, "read_timeout": ANSWER_S}
        retries: Any = {"mode": "standard", "total_max_attempts": max_tries}
        with self._lock:  # a session can't make two clients at once
            if (pid, max_tries) not in self._clients:
                self._clients[pid, max_tries] = self.session.client(
                    "s3",
                    endpoint_url=settings.endpoint_url,
                    region_name=self._region,
                    verify=settings.verify,
                    config=Config(s3=style, retries=retries, **timeouts),
                )
            return self._clients[pid, max_tries]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self.settings, self._profile_to_reopen()))

    def _profile_to_reopen(self) -> str | None:
        import boto3
        from botocore.credentials import RefreshableCredentials

        profile: str | None = self.session._session.profile
        mine: Any = self.session.get_credentials()
        there: Any = boto3.Session(profile_name=profile).get_credentials()
        renewed = isinstance(mine, RefreshableCredentials)
        if there is None or not (renewed or mine.access_key == there.access_key):
            raise StoreRefusedError(
                f"{self} was opened with keys given in code: another process can't open it, for secrets are "
                "never pickled. Put the keys into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            )
        return profile

    def __str__(self) -> str:
        return self.settings.uri


def _reopen(settings: S3Settings, profile: str | None) -> Bucket:
    import boto3

    return Bucket(settings, boto3.Session(profile_name=profile))


def _is_protected(settings: S3Settings) -> bool:
    """Whether bodies needn't be signed: TLS protects them, or they stay on this host and carry a checksum."""
    parts = urlsplit(settings.endpoint_url or "")
    return parts.scheme != "http" or (parts.hostname in LOOPBACK and settings.checksums)


def _endpoint(url: str, settings: S3Settings) -> str:
    """The address as obstore wants it: in virtual-hosted style it names the bucket."""
    if settings.path_style:
        return url
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{settings.bucket}.{rest}"


def _client_options(settings: S3Settings) -> "ClientConfig":
    options: ClientConfig = {"connect_timeout": f"{CONNECT_S}s", "timeout": f"{BULK_S}s"}
    if (settings.endpoint_url or "").startswith("http://"):
        options["allow_http"] = True
    if settings.verify is False:
        options["allow_invalid_certificates"] = True
    if isinstance(settings.verify, str):
        options["root_certificate"] = _read_ca(settings.verify)
    return options


def _read_ca(path: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StoreRefusedError(f"the CA file {path!r} of the store can't be read: {error}") from error
    if b"-----BEGIN CERTIFICATE-----" not in data:
        raise StoreRefusedError(f"the CA file {path!r} of the store holds no certificate in PEM")
    return data


def _refuse_bad_certificate(settings: S3Settings, store: S3Store) -> None:
    """Ask once: obstore takes a certificate that isn't trusted for a failure that may pass, and retries."""
    try:
        store.head("layertap.json")
    except (BaseError, OSError) as error:
        found = BAD_CERTIFICATE.search(str(error))
        if not found:  # whatever it is, the next request meets it too
            return
    else:
        return
    by = f"the CA file {settings.verify!r}" if isinstance(settings.verify, str) else "this host's CAs"
    raise StoreRefusedError(
        f"the certificate of {settings.endpoint_url} isn't good by {by} ({found[1]}): name the PEM file of "
        "the store's own CA in AWS_CA_BUNDLE, or as verify_cert_path in the block's client parameters"
    )
