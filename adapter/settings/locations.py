"""Parses where a store is: a bucket and a prefix in it, the URL of a web server, or a folder."""

import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import SplitResult, unquote, urlsplit

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # a folder of such a name: ./NAME
_ENDPOINT_NAME = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9](-*[A-Za-z0-9])*")  # as AWS has it
_FORMS = (
    "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, https://HOST/PATH or a folder"
)


class StoreKind(Enum):
    S3 = "s3"
    GCS = "gs"
    AZURE = "az"
    HTTP = "http"
    FOLDER = "folder"


_BUCKETS = {kind.value: kind for kind in (StoreKind.S3, StoreKind.GCS, StoreKind.AZURE)}
_CALLED = {
    StoreKind.S3: "bucket",
    StoreKind.GCS: "bucket",
    StoreKind.AZURE: "container",
    StoreKind.HTTP: "URL",
}


class HoldsCredentials(ValueError):
    """Raised for a URL that seems to contain credentials and must not be shown."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """The location of a store."""

    kind: StoreKind
    base: str  # bucket or container, URL of a web server without a slash at its end, or folder
    prefix: str = ""  # of every key in a bucket, without slashes around it

    @property
    def is_folder(self) -> bool:
        return self.kind is StoreKind.FOLDER

    def place(self, path: str) -> str:
        """Name a key for callers, as in `bucket: models, key: team-a/digits.tar.gz`; the store for
        an empty path. The text has no path of this machine.
        """
        if self.is_folder:
            return f"key: {path}" if path else "the folder itself"
        key = "/".join(filter(None, (self.prefix, path)))
        return f"{_CALLED[self.kind]}: {self.base}" + (f", key: {key}" if key else "")

    def __str__(self) -> str:
        if self.kind in {StoreKind.HTTP, StoreKind.FOLDER}:
            return self.base
        return f"{self.kind.value}://{self.base}" + (f"/{self.prefix}" if self.prefix else "")


def parse_location(value: object) -> StoreLocation:
    """Read a URL or the path of a folder. ValueError names the accepted forms."""
    if isinstance(value, StoreLocation):
        return value
    text = str(value)
    if text and "\0" not in text:
        is_url = _SCHEME.match(text) is not None
        return _of_url(text) if is_url else StoreLocation(StoreKind.FOLDER, text)
    raise ValueError(f"write {_FORMS}")


def _of_url(text: str) -> StoreLocation:
    try:
        url = urlsplit(text)
    except ValueError as error:
        raise ValueError(f"write {_FORMS}") from error
    if "@" in url.netloc or url.query or url.fragment:
        raise HoldsCredentials(
            "write the URL alone: credentials are found as the store's own tools find them, by"
            " variables and files"
        )
    if url.scheme == "file":
        if url.netloc or not url.path.startswith("/"):
            raise ValueError("write file:///PATH")
        return StoreLocation(StoreKind.FOLDER, unquote(url.path))
    if "://" not in text:
        raise ValueError(f"put two slashes after the colon: write {_FORMS}")
    if url.scheme in {"http", "https"} and url.netloc:
        return StoreLocation(StoreKind.HTTP, text.rstrip("/"))
    return _of_bucket(url)


def _of_bucket(url: SplitResult) -> StoreLocation:
    kind = _BUCKETS.get(url.scheme)
    if kind is not None and not url.netloc:
        raise ValueError(f"there is no {_CALLED[kind]} in it: write {_FORMS}")
    if kind is None or not _BUCKET.fullmatch(url.netloc):
        raise ValueError(f"write {_FORMS}")
    return StoreLocation(kind, url.netloc, url.path.strip("/"))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A name that callers use, and the store behind it."""

    name: str
    models: StoreLocation

    def __str__(self) -> str:
        return f"{self.name}={self.models}"


def parse_endpoints(value: object) -> tuple[Endpoint, ...]:
    """Read lines of NAME=URL, or YAML's `NAME: {models: URL}`. ValueError says what is wrong."""
    if isinstance(value, dict):
        pairs = [(str(name), _models(what)) for name, what in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [_pair(line) for line in value]
    else:
        pairs = [_pair(line) for line in str(value).splitlines()]
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} occurs twice")
    for number, name in enumerate(names, 1):
        if _ENDPOINT_NAME.fullmatch(name) is None:  # not quoted: it may be a URL with a password
            raise ValueError(
                f"endpoint {number}: a name has letters, digits and dashes, at most 63"
            )
    return tuple(Endpoint(name, parse_location(where)) for name, where in pairs)


def _pair(line: object) -> tuple[str, object]:
    if isinstance(line, Endpoint):
        return line.name, line.models
    name, equals, where = str(line).partition("=")
    if not equals:
        raise ValueError("write NAME=URL")
    return name, where


def _models(what: object) -> object:
    """Return the URL in the value of an endpoint in the file."""
    if isinstance(what, dict) and set(what) == {"models"}:
        return what["models"]
    if isinstance(what, str):
        return what
    raise ValueError("write NAME: {models: URL}")
