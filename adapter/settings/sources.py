"""Merges flags, environment, file and inherited names, and collects the problems of all; renders
what is in force.
"""

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from adapter.core.byte_sizes import format_exact_size
from adapter.errors import InvalidSettings
from adapter.settings import modelmesh, sagemaker
from adapter.settings.locations import Endpoint, HoldsCredentials, StoreLocation
from adapter.settings.model import GROUPS, SECRETS, UNQUOTED, Group, Settings, metavar_of, unset_of
from adapter.settings.values import Address, Reserve, flag_of, variable_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

CONFIG_VARIABLE = "ADAPTER_CONFIG"
_PREFIX = "ADAPTER_"
_AT_FILE = "file:"
_LISTENERS = ("http", "grpc", "admin")
# Without a store each of these is an error or, if it is not a switch, of no use.
_OF_STORES = [n for n in GROUPS[Group.ENDPOINT] if n not in {"model_store", "endpoints"}]
_OFF = frozenset({"", "0", "0.0", "false", "off", "no", "()", "[]", "none"})
_NOT_OF_A_SCHEMA = frozenset({"title", "unset", "gt", "ge", "lt"})
_ENDPOINTS_OF_S3 = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# Kubernetes sets these in every container of a namespace with a Service named adapter or adapter-*.
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?=.*|\w+_PORT=\w+://.*"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Holds the settings in force."""

    settings: Settings
    origins: dict[str, str]  # `flag --http`, `environment ADAPTER_HTTP`, `default`
    warnings: list[str]

    def with_root(self, root: Path) -> "Loaded":
        """Return a copy with one more model root."""
        roots = (*self.settings.model_roots, root)
        return replace(self, settings=self.settings.model_copy(update={"model_roots": roots}))


@dataclass(frozen=True, slots=True)
class _Given:
    """Holds a value of one source."""

    value: object
    origin: str
    label: str  # begins the text of a problem with it
    written: object  # by the user; asterisks where it may hold a secret


def load_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None
) -> Loaded:
    """Merge all sources. None and an empty variable count as not set.

    Raises InvalidSettings with every problem of every source.
    """
    problems = modelmesh.problems(environ)
    given = {
        **_from_file(environ, file, problems),
        **_from_environment(environ, problems),
        **_from_flags(flags),
    }
    _read_token(given, problems)
    written = {name: item.value for name, item in given.items()}
    problems += [
        f"{given[name].label}: {given[name].written!r}: it needs model_store or endpoints"
        for name in _without_a_store(written)
    ]
    problems += _store_problems(written, environ)
    is_embedded = "triton" in given and given["triton"].value == "embedded"
    problems += sagemaker.problems(environ, is_embedded=is_embedded)
    inherited = _inherited(environ, is_embedded=is_embedded, given=given)
    given = {name: each for name, each in given.items() if not _is_left_to(inherited, name, each)}
    listeners = {
        **_at_listen_host(given.get("listen_host")),
        **_default_triton_ports(is_embedded=is_embedded),
    }
    given = {**listeners, **inherited, **given}
    try:
        values = {name: item.value for name, item in given.items()}
        settings = Settings.model_validate(values, context={"environ": environ})
    except ValidationError as error:
        problems += [_problem(detail, given) for detail in error.errors()]
        raise InvalidSettings(problems) from error
    if problems:
        raise InvalidSettings(problems)
    origins = {n: given[n].origin if n in given else "default" for n in Settings.model_fields}
    warnings = modelmesh.warnings(environ) + sagemaker.warnings(environ)
    warnings += _store_warnings(settings.model_store, settings.endpoints, given)
    return Loaded(settings, origins, warnings)


def file_schema() -> dict[str, Any]:
    """Return the JSON schema of a file of settings."""
    properties = Settings.model_json_schema()["properties"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of triton-adapter",
        "type": "object",
        "additionalProperties": False,
        "properties": {n: _keywords(each) for n, each in properties.items() if n not in SECRETS},
    }


def _keywords(node: Any) -> Any:
    """Leave out what pydantic adds beside the keywords of JSON schema."""
    if isinstance(node, dict):
        return {key: _keywords(value) for key, value in node.items() if key not in _NOT_OF_A_SCHEMA}
    return [_keywords(each) for each in node] if isinstance(node, list) else node


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Given]:
    return {
        name: _Given(value, origin := f"flag {flag_of(name)}", origin, _quoted(name, value))
        for name, value in flags.items()
        if value is not None
    }


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, _Given]:
    names = {variable_of(name): name for name in Settings.model_fields}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(_PREFIX) or variable in {CONFIG_VARIABLE, "ADAPTER_PORT"}:
            continue
        if (name := names.get(variable)) is None:
            if not _SERVICE_LINK.fullmatch(f"{variable}={value}"):
                advice = _no_such(variable, [*names, CONFIG_VARIABLE])
                problems.append(f"environment {variable}: {advice}")
        elif value:
            origin = f"environment {variable}"
            found[name] = _Given(value, origin, origin, _quoted(name, value))
    return found


def _read_token(given: dict[str, _Given], problems: list[str]) -> None:
    """Put the content of the file that `control_token` names in its place, if it names one."""
    item = given.get("control_token")
    if item is None or not str(item.value).startswith(_AT_FILE):
        return
    del given["control_token"]
    path = str(item.value).removeprefix(_AT_FILE)
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "no text"
        problems.append(f"{item.label}: {item.value!r}: {reason}")
        return
    origin = f"file {path}"
    given["control_token"] = _Given(text, origin, origin, "***")


def _from_file(
    environ: Mapping[str, str], file: Path | None, problems: list[str]
) -> dict[str, _Given]:
    named_by = "flag --config" if file else f"environment {CONFIG_VARIABLE}"
    if (path := str(file or environ.get(CONFIG_VARIABLE, ""))) == "":
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{named_by}: {path!r}: {error.strerror}")
        return {}
    except (ValueError, yaml.YAMLError) as error:
        problems.append(f"{named_by}: {path}{_fault(error)}")
        return {}
    if not isinstance(content, dict | None):
        problems.append(f"{named_by}: {path!r}: write `name: value` lines")
        return {}
    found = {}
    for key, value in (content or {}).items():
        label = f"file {path}, key {key}"
        if why := _find_key_fault(str(key)):
            problems.append(f"{label}: {why}")
        elif value is not None:
            found[key] = _Given(value, f"file {path}", label, _quoted(key, value))
    return found


def _quoted(name: str, value: object) -> object:
    """Return the value as a refusal of it quotes it."""
    return "***" if name in UNQUOTED else value


def _find_key_fault(key: str) -> str:
    """Return why the settings file may not have this key; empty if it may."""
    if key in SECRETS:
        return f"no place for a secret: give it as {variable_of(key)}, or as file:PATH there"
    if key not in Settings.model_fields:
        return _no_such(key, list(Settings.model_fields))
    return ""


def _at_listen_host(host: _Given | None) -> dict[str, _Given]:
    """Return the listeners at `listen_host`, with their default ports."""
    if host is None:
        return {}
    ports = {name: Settings.model_fields[name].default.rpartition(":")[2] for name in _LISTENERS}
    return {
        name: replace(host, value=Address("tcp", str(host.value), int(port)))
        for name, port in ports.items()
    }


def _default_triton_ports(*, is_embedded: bool) -> dict[str, _Given]:
    """Return the addresses of an embedded Triton that nobody but the adapter needs to know."""
    if not is_embedded:
        return {}
    at, origin = "127.0.0.1:0", "default with triton=embedded"
    return {name: _Given(at, origin, origin, at) for name in ("triton_http", "triton_grpc")}


def _fault(error: Exception) -> str:
    """Return the problem of a YAML text, after `:LINE:COLUMN` if that is known."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f": {' '.join(str(error).split())}"
    said = [text for text in (error.context, error.problem) if text]  # type: ignore[attr-defined]
    return f":{mark.line + 1}:{mark.column + 1}: {', '.join(said)}"


def _inherited(
    environ: Mapping[str, str], *, is_embedded: bool, given: Mapping[str, _Given]
) -> dict[str, _Given]:
    """Return the settings that SageMaker and ModelMesh set by names of their own."""
    host = str(given["listen_host"].value) if "listen_host" in given else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    names = (
        *sagemaker.inherited(environ, is_embedded=is_embedded),
        *modelmesh.inherited(environ, host),
    )
    return _named(names, environ)


def _is_left_to(inherited: Mapping[str, _Given], name: str, given: _Given) -> bool:
    """Return whether the user left a setting of the platform at `auto`."""
    return name in inherited and given.value == "auto"


def _named(
    names: Iterable[tuple[str, str, object]], environ: Mapping[str, str]
) -> dict[str, _Given]:
    return {
        name: _Given(value, variable, variable, environ.get(variable, value))
        for variable, name, value in names
    }


def _no_such(name: str, known: list[str]) -> str:
    bare = {known_name.removeprefix(_PREFIX): known_name for known_name in known}
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), bare, n=1)
    return f"no such setting; did you mean {bare[near[0]]}?" if near else "no such setting"


def _problem(detail: "ErrorDetails", given: Mapping[str, _Given]) -> str:
    name = str(detail["loc"][0])
    item = given[name]
    inside = len(detail["loc"]) > 1  # the problem is one of several values
    written = _quoted(name, detail["input"]) if inside else item.written
    is_list = detail["type"] == "tuple_type"
    if isinstance(detail.get("ctx", {}).get("error"), HoldsCredentials):
        written = "***"
    rule = "write a list" if is_list else detail["msg"].removeprefix("Value error, ")
    return f"{item.label}: {written!r}: {rule}"


def _is_switch(name: str) -> bool:
    """Return whether a setting is off by default: then it changes what is served, and without a
    store it is an error.
    """
    return Settings.model_fields[name].default in (False, (), 0.0)


def _without_a_store(values: Mapping[str, object]) -> list[str]:
    """Return the settings that need a store, if none is set. `values`: all that are set."""
    if values.get("model_store") or values.get("endpoints"):
        return []
    switches = (n for n in _OF_STORES if n in values and _is_switch(n))
    return [n for n in switches if str(values[n]).lower() not in _OFF]


def _store_problems(values: Mapping[str, object], environ: Mapping[str, str]) -> list[str]:
    """Return the problems of variables that stores read by themselves."""
    if "s3://" not in f"{values.get('model_store')} {values.get('endpoints')}":
        return []
    return [
        f"environment {name}: {address!r}: write http://HOST:PORT or https://HOST:PORT"
        for name in _ENDPOINTS_OF_S3
        if (address := environ.get(name)) and not address.startswith(("http://", "https://"))
    ]


def _store_warnings(
    model_store: StoreLocation | None, endpoints: Sequence[Endpoint], given: Mapping[str, object]
) -> list[str]:
    """Return what may be intended, or be repaired while the adapter runs."""
    stores = [("model_store", model_store)] if model_store else []
    stores += [(f"endpoints, {each.name}", each.models) for each in endpoints]
    found = [f"{name}: {why}" for name, store in stores if (why := _why_unusable(store))]
    if not stores:
        unused = (n for n in _OF_STORES if n in given and not _is_switch(n))
        found += [f"{name}: has no effect without model_store or endpoints" for name in unused]
    return found


def _why_unusable(store: StoreLocation) -> str | None:
    if not store.is_folder:
        return None
    path = os.path.expanduser(store.base)  # noqa: PTH111 - as a text
    if not os.path.exists(path):  # noqa: PTH110
        return f"the folder {store.base} does not exist"
    if not os.path.isdir(path):  # noqa: PTH112
        return f"{store.base} is not a folder"
    if not os.access(path, os.R_OK | os.X_OK):
        return f"the folder {store.base} cannot be read by this user"
    return None


def masked(name: str, value: object) -> object:
    """Return the value, or asterisks for a secret."""
    return "***" if name in SECRETS and value is not None else value


def for_programs(loaded: Loaded) -> dict[str, Any]:
    """Return each setting's value and origin as JSON values."""
    return {
        name: {"value": _plain(masked(name, value)), "origin": loaded.origins[name]}
        for name, value in loaded.settings
    }


def for_people(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return the name, the value and the origin of each setting. The origin of one without a value
    also says what that means.
    """
    return [
        (name, _with_unit(name, masked(name, value)), _origin(name, value, loaded.origins[name]))
        for name, value in loaded.settings
    ]


def help_of(name: str) -> str:
    """Return the text of a setting for --help."""
    field = Settings.model_fields[name]
    default = as_text(name, field.default)
    return f"{field.description} (default: {default}; environment: {variable_of(name)})"


def _with_unit(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Reserve) and not value.percent:
        return format_exact_size(value.size_bytes)
    text = as_text(name, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if metavar_of(name) == "SIZE":
            return format_exact_size(int(value))
        return f"{text} s" if metavar_of(name) == "SECONDS" else text
    return text


def _origin(name: str, value: object, origin: str) -> str:
    return f"{origin}: {as_text(name, None)}" if value is None else origin


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else str(value)


def as_text(name: str, value: object) -> str:
    """Return the value of a setting for people: a default as written, or a validated value."""
    if value is None:
        return unset_of(name)
    if isinstance(value, tuple):
        return " ".join(shlex.quote(str(item)) for item in value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
