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
    """Lists the kinds of stores by the schemes of their URLs."""

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
    """Says where a store is."""

    kind: StoreKind
    base: str  # bucket or container, URL of a web server without a slash at its end, or folder
    prefix: str = ""  # of every key in a bucket, without slashes around it

    @property
    def is_folder(self) -> bool:
        """Return whether the store is a folder of this machine."""
        return self.kind is StoreKind.FOLDER

    def place(self, path: str) -> str:
        """Name a key for callers, as in `bucket: models, key: team-a/digits.tar.gz`.

        An empty path names the store. The text has no path of this machine.
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
    """Parse a URL or the path of a folder. Raises ValueError, which names the accepted forms."""
    if isinstance(value, StoreLocation):
        return value
    text = str(value)
    if text and "\0" not in text:
        is_url = _SCHEME.match(text) is not None
        return _parse_url(text) if is_url else StoreLocation(StoreKind.FOLDER, text)
    raise ValueError(f"write {_FORMS}")


def _parse_url(text: str) -> StoreLocation:
    """Parse the URL of a store. Raises ValueError; HoldsCredentials for one with a password."""
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
    return _parse_bucket(url)


def _parse_bucket(url: SplitResult) -> StoreLocation:
    """Parse the URL of a bucket or container. Raises ValueError."""
    kind = _BUCKETS.get(url.scheme)
    if kind is not None and not url.netloc:
        raise ValueError(f"there is no {_CALLED[kind]} in it: write {_FORMS}")
    if kind is None or not _BUCKET.fullmatch(url.netloc):
        raise ValueError(f"write {_FORMS}")
    return StoreLocation(kind, url.netloc, url.path.strip("/"))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Names a store for callers of the endpoint."""

    name: str
    models: StoreLocation

    def __str__(self) -> str:
        return f"{self.name}={self.models}"


def parse_endpoints(value: object) -> tuple[Endpoint, ...]:
    """Parse lines of NAME=URL, or YAML's `NAME: {models: URL}`. Raises ValueError."""
    if isinstance(value, dict):
        pairs = [(str(name), _find_url(fields)) for name, fields in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [_split_line(line) for line in value]
    else:
        pairs = [_split_line(line) for line in str(value).splitlines()]
    names = [name for name, _ in pairs]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} occurs twice")
    for number, name in enumerate(names, 1):
        if _ENDPOINT_NAME.fullmatch(name) is None:  # not quoted: it may be a URL with a password
            raise ValueError(
                f"endpoint {number}: a name has letters, digits and dashes, at most 63"
            )
    return tuple(Endpoint(name, parse_location(url)) for name, url in pairs)


def _split_line(line: object) -> tuple[str, object]:
    """Return the name and the URL of a line. Raises ValueError."""
    if isinstance(line, Endpoint):
        return line.name, line.models
    name, equals, url = str(line).partition("=")
    if not equals:
        raise ValueError("write NAME=URL")
    return name, url


def _find_url(fields: object) -> object:
    """Return the URL in the value of an endpoint in the file. Raises ValueError."""
    if isinstance(fields, dict) and set(fields) == {"models"}:
        return fields["models"]
    if isinstance(fields, str):
        return fields
    raise ValueError("write NAME: {models: URL}")
