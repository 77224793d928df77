"""Defines the types of settings: how each reads text or YAML, and what --help shows for it."""

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from adapter.core.artifacts import parse_artifact_path
from adapter.core.byte_sizes import parse_size
from adapter.errors import InvalidRequest
from adapter.settings.locations import Endpoint, StoreLocation, parse_endpoints, parse_location

_MAX_PORT = 65535
_ALL_PERCENT = 100
_TOKEN_CHARACTERS = 16
_ACCESS_KEY = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_KEY_WORDS = 3
_KEY_FORM = "write ACCESS_KEY, env:VARIABLE or file:PATH of its secret, and patterns of TargetModel"


class Metavar(str):
    """Metadata of a type: the word that --help shows for a value."""

    __slots__ = ()


def flag_of(name: str) -> str:
    """Return a setting's name as a flag."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Return a setting's name in the environment."""
    return "ADAPTER_" + name.upper()


@dataclass(frozen=True, slots=True)
class Address:
    """Says where to listen or to connect. Only the parts of its kind are set."""

    kind: Literal["tcp", "unix", "off"]
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def host_port(self) -> tuple[str, int]:
        """Return host and port of a TCP address."""
        return self.host, self.port

    def is_apart_from(self, other: "Address") -> bool:
        """Return whether this is an address to listen at besides `other`.

        Two equal ones with port 0, any free port, are two listeners.
        """
        is_any_port = self.kind == "tcp" and self.port == 0
        return self.kind != "off" and (self != other or is_any_port)

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can connect, over TCP."""
        if self.kind != "tcp" or self.host == "localhost":
            return self.kind == "tcp"
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_open_to_others(self) -> bool:
        """Return whether other machines can connect, as far as the address says."""
        return self.kind == "tcp" and not self.is_loopback

    def __str__(self) -> str:
        if self.kind == "tcp":
            return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return f"unix:{self.path}" if self.kind == "unix" else "off"


def parse_address(value: object) -> Address:
    """Parse `HOST:PORT`, `[IPV6]:PORT`, `unix:/path` or `off`, which YAML reads as False.

    Raises ValueError.
    """
    if isinstance(value, Address):
        return value
    if value is False or value == "off":
        return Address("off")
    text = str(value)
    if text.startswith("unix:/"):
        return Address("unix", path=text.removeprefix("unix:"))
    host, _, port = text.rpartition(":")
    has_brackets = host.startswith("[") and host.endswith("]")
    if has_brackets:
        host = host[1:-1]
    if not host or (":" in host) is not has_brackets or re.fullmatch("[0-9]{1,5}", port) is None:
        raise ValueError("write HOST:PORT, [IPV6]:PORT, unix:/path or off")
    if int(port) > _MAX_PORT:
        raise ValueError(f"a port is at most {_MAX_PORT}")
    return Address("tcp", host, int(port))


@dataclass(frozen=True, slots=True)
class Reserve:
    """Keeps memory free of loads: a share of the limit or a number of bytes."""

    percent: float = 0.0
    size_bytes: int = 0

    def compute_bytes(self, limit_bytes: int) -> int:
        """Return how many bytes of a limit no load is admitted into."""
        return int(limit_bytes * self.percent / _ALL_PERCENT) + self.size_bytes

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent else str(self.size_bytes)


@dataclass(frozen=True, slots=True)
class SingleModel:
    """Names the one package of a container, and folders beside it whose models its code calls."""

    folder: Path
    helpers: tuple[str, ...] = ()  # names of the folders

    def __str__(self) -> str:
        return ":".join((str(self.folder), *self.helpers))


def _parse_single_model(value: object) -> SingleModel:
    """Parse `FOLDER` or `FOLDER:NAME...`, also as a list."""
    names = value if isinstance(value, list) else str(value).split(":")
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("write FOLDER, or a list of it and of names, each a text")
    folder, *helpers = names
    _refuse_empty_path(folder)
    return SingleModel(Path(folder), tuple(helpers))


@dataclass(frozen=True, slots=True)
class EndpointKey:
    """Allows callers who sign with a key to call some models of the endpoint."""

    access_key: str
    secret: str = field(repr=False)
    models: tuple[str, ...]  # patterns of TargetModel, with `*` and `?` as in AWS's policies


def parse_endpoint_key(text: str, environ: Mapping[str, str]) -> EndpointKey:
    """Parse `ACCESS_KEY env:VARIABLE|file:PATH PATTERN...`, and read the secret at that place.

    Raises ValueError, which quotes nothing: any word may be a secret in the wrong place.
    """
    words = text.split()
    if len(words) < _KEY_WORDS:
        raise ValueError(_KEY_FORM)
    access_key, where, *models = words
    if _ACCESS_KEY.fullmatch(access_key) is None:
        raise ValueError(
            "its first word is not an access key: use letters, digits, `_`, `.` and `-`"
        )
    return EndpointKey(access_key, _read_secret(where, environ), tuple(models))


def secret_variables(keys: Iterable[str]) -> frozenset[str]:
    """Return the names of the variables that hold secrets."""
    places = (text.split()[1] for text in keys)
    return frozenset(place.removeprefix("env:") for place in places if place.startswith("env:"))


def _read_secret(where: str, environ: Mapping[str, str]) -> str:
    """Return the secret of a key. Raises ValueError."""
    kind, _, name = where.partition(":")
    match kind:
        case "env":
            secret = environ.get(name, "")
        case "file":
            try:
                secret = Path(name).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ValueError(f"the file behind `file:`: {error.strerror}") from error
            except ValueError as error:
                raise ValueError("the file behind `file:` is not a text") from error
        case _:
            raise ValueError(_KEY_FORM)
    if not secret:
        place = "variable" if kind == "env" else "file"
        raise ValueError(f"there is no secret in the {place} behind `{kind}:`")
    return secret


def _parse_reserve(value: object) -> Reserve:
    """Parse `10%` or a number of bytes. Raises ValueError."""
    if isinstance(value, Reserve):
        return value
    if (share := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", str(value))) is None:
        return Reserve(size_bytes=_parse_size(value))
    if float(share[1]) >= _ALL_PERCENT:
        raise ValueError("a share is less than 100%")
    return Reserve(percent=float(share[1]))


def _refuse_empty_path(value: object) -> object:
    """Return the path of a file or folder. Raises ValueError for an empty text.

    That would be the current folder, which in a container is often all of its files.
    """
    if value == "":
        raise ValueError("write a path: it is empty; for the current folder write `.`")
    return value


def _split_lines(value: object) -> object:
    return value.splitlines() if isinstance(value, str) else value


def _split_commas(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


def _parse_size(value: object) -> int:
    return parse_size(str(value))


def _parse_concurrency(value: object) -> object:
    """Parse a number or `instances`. Raises ValueError."""
    if value == "instances":
        return value
    if re.fullmatch("[0-9]{1,9}", str(value)) is None:
        raise ValueError("write a number or instances")
    return int(str(value))


def _check_listen_host(text: str) -> str:
    """Return an address or name without a port. Raises ValueError."""
    if re.fullmatch(r"[\w.-]+", text, re.ASCII) is None:
        try:
            IPv6Address(text)
        except ValueError as error:
            raise ValueError("write an address or a name, without a port") from error
    return text


def _check_tcp(address: Address) -> Address:
    """Return an address of TCP. Raises ValueError."""
    if address.kind != "tcp":
        raise ValueError("write HOST:PORT or [IPV6]:PORT")
    return address


def _check_host(name: str) -> str:
    """Return the name of a host. Raises ValueError."""
    if re.fullmatch(r"[A-Za-z0-9._-]+", name) is None:
        raise ValueError("write the name of a host, without scheme and port")
    return name


def _check_regex(text: str) -> str:
    """Return a regular expression. Raises ValueError."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return text


def _check_key(text: str) -> str:
    """Return a model's key in a store. Raises ValueError."""
    try:
        return parse_artifact_path(text)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error


def _check_token(secret: SecretStr) -> SecretStr:
    """Return a token that is long enough. Raises ValueError."""
    text = secret.get_secret_value()
    if len(text) < _TOKEN_CHARACTERS or re.fullmatch(r"[A-Za-z0-9._~+/-]+=*", text) is None:
        raise ValueError(
            f"write at least {_TOKEN_CHARACTERS} letters, digits and -._~+/ (RFC 6750), as "
            "`openssl rand -hex 32` makes them"
        )
    return secret


# What a file of settings may have in place of these types: YAML reads `off` as False.
_Text = str | Literal[False]
_Texts = str | list[str]
_EndpointLines = _Texts | dict[str, dict[str, str]]

ListenHost = Annotated[str, AfterValidator(_check_listen_host), Metavar("HOST")]
AnyAddress = Annotated[
    Address, BeforeValidator(parse_address, json_schema_input_type=_Text), Metavar("HOST:PORT")
]
TcpAddress = Annotated[AnyAddress, AfterValidator(_check_tcp)]
_ToBytes = BeforeValidator(_parse_size, json_schema_input_type=int | str)
Size = Annotated[int, _ToBytes, Field(gt=0), Metavar("SIZE")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Metavar("SECONDS")]
AnySeconds = Annotated[float, Field(ge=0, allow_inf_nan=False), Metavar("SECONDS")]
Count = Annotated[int, Field(ge=1, lt=2**31), Metavar("N")]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False), Metavar("NUMBER")]
_Path = Annotated[Path, BeforeValidator(_refuse_empty_path)]
File = Annotated[_Path, Metavar("FILE")]
Folder = Annotated[_Path, Metavar("FOLDER")]
Paths = Annotated[
    tuple[_Path, ...],
    BeforeValidator(
        lambda v: v.split(os.pathsep) if isinstance(v, str) else v, json_schema_input_type=_Texts
    ),
    Metavar("FOLDER"),
]
Models = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(
        lambda v: v.split(":") if isinstance(v, str) else v, json_schema_input_type=_Texts
    ),
    Metavar("[NAME=]PATH"),
]
ModelKeys = Annotated[
    tuple[Annotated[str, AfterValidator(_check_key)], ...],
    BeforeValidator(_split_lines, json_schema_input_type=_Texts),
    Metavar("KEY"),
]
Arguments = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda v: shlex.split(v) if isinstance(v, str) else v, json_schema_input_type=_Texts
    ),
    Metavar("ARGUMENT"),
]
Patterns = Annotated[
    tuple[Annotated[str, AfterValidator(_check_regex)], ...],
    BeforeValidator(_split_lines, json_schema_input_type=_Texts),
    Metavar("REGEX"),
]
_Lines = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_split_lines, json_schema_input_type=_Texts),
]
KeyLines = Annotated[_Lines, Metavar("KEY")]
NamePatterns = Annotated[_Lines, Metavar("PATTERN")]
Store = Annotated[
    StoreLocation,
    BeforeValidator(parse_location, json_schema_input_type=str),
    Metavar("URL|FOLDER"),
]
Endpoints = Annotated[
    tuple[Endpoint, ...],
    BeforeValidator(parse_endpoints, json_schema_input_type=_EndpointLines),
    Metavar("NAME=URL"),
]
Single = Annotated[
    SingleModel,
    BeforeValidator(_parse_single_model, json_schema_input_type=_Texts),
    Metavar("FOLDER[:NAME]"),
]
Share = Annotated[
    Reserve,
    BeforeValidator(_parse_reserve, json_schema_input_type=int | str),
    Metavar("PERCENT|SIZE"),
]
Hosts = Annotated[
    tuple[Annotated[str, AfterValidator(_check_host)], ...],
    BeforeValidator(_split_commas, json_schema_input_type=_Texts),
    Metavar("HOST"),
]
Token = Annotated[SecretStr, AfterValidator(_check_token), Metavar("TOKEN")]
OnOff = Annotated[
    Literal["on", "off"],
    # YAML reads them as True and False
    BeforeValidator(
        lambda v: {True: "on", False: "off"}[v] if isinstance(v, bool) else v,
        json_schema_input_type=Literal["on", "off"] | bool,
    ),
]
Passthrough = Annotated[
    tuple[Literal["shared_memory", "trace", "log"], ...],
    BeforeValidator(_split_commas, json_schema_input_type=_Texts),
    Metavar("shared_memory|trace|log"),
]
Concurrency = Annotated[
    int | str,
    BeforeValidator(_parse_concurrency, json_schema_input_type=int | Literal["instances"]),
    Metavar("N|instances"),
]
