"""Merges flags, environment, file and inherited names, and reports the problems of all at once.

It also shows the settings in force, to people and to programs.
"""

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
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
# Settings that, without a store, are errors or, if they are no switches, of no use.
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
class _Input:
    """Holds the value that one source has for a setting."""

    value: object
    origin: str
    label: str  # begins the text of a problem with the value
    written: object  # as the user wrote it; asterisks where it may hold a secret


def load_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None
) -> Loaded:
    """Merge all sources. None and an empty variable count as not set.

    Raises InvalidSettings with every problem of every source.
    """
    problems = modelmesh.problems(environ)
    inputs = {
        **_read_file(environ, file, problems),
        **_read_environment(environ, problems),
        **_read_flags(flags),
    }
    _read_token(inputs, problems)
    written = {name: item.value for name, item in inputs.items()}
    problems += [
        f"{inputs[name].label}: {inputs[name].written!r}: it needs model_store or endpoints"
        for name in _find_storeless(written)
    ]
    problems += _find_store_problems(written, environ)
    is_embedded = "triton" in inputs and inputs["triton"].value == "embedded"
    problems += sagemaker.problems(environ, is_embedded=is_embedded)
    inherited = _read_inherited(environ, is_embedded=is_embedded, inputs=inputs)
    inputs = {name: item for name, item in inputs.items() if not _is_auto(inherited, name, item)}
    listeners = {
        **_list_at_host(inputs.get("listen_host")),
        **_default_triton_ports(is_embedded=is_embedded),
    }
    inputs = {**listeners, **inherited, **inputs}
    try:
        values = {name: item.value for name, item in inputs.items()}
        settings = Settings.model_validate(values, context={"environ": environ})
    except ValidationError as error:
        problems += [_describe_problem(detail, inputs) for detail in error.errors()]
        raise InvalidSettings(problems) from error
    if problems:
        raise InvalidSettings(problems)
    origins = {
        name: inputs[name].origin if name in inputs else "default" for name in Settings.model_fields
    }
    warnings = modelmesh.warnings(environ) + sagemaker.warnings(environ)
    warnings += _find_store_warnings(settings.model_store, settings.endpoints, inputs)
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


def _read_flags(flags: Mapping[str, object]) -> dict[str, _Input]:
    """Return the settings of the command line."""
    inputs = {}
    for name, value in flags.items():
        if value is not None:
            origin = f"flag {flag_of(name)}"
            inputs[name] = _Input(value, origin, origin, _quote(name, value))
    return inputs


def _read_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, _Input]:
    """Return the settings of the environment; unknown names are problems."""
    names = {variable_of(name): name for name in Settings.model_fields}
    inputs = {}
    for variable, value in environ.items():
        if not variable.startswith(_PREFIX) or variable in {CONFIG_VARIABLE, "ADAPTER_PORT"}:
            continue
        name = names.get(variable)
        if name is None:
            if not _SERVICE_LINK.fullmatch(f"{variable}={value}"):
                advice = _explain_unknown(variable, [*names, CONFIG_VARIABLE])
                problems.append(f"environment {variable}: {advice}")
        elif value:
            origin = f"environment {variable}"
            inputs[name] = _Input(value, origin, origin, _quote(name, value))
    return inputs


def _read_token(inputs: dict[str, _Input], problems: list[str]) -> None:
    """Put the content of the file that `control_token` names in its place, if it names one."""
    item = inputs.get("control_token")
    if item is None or not str(item.value).startswith(_AT_FILE):
        return
    del inputs["control_token"]
    path = str(item.value).removeprefix(_AT_FILE)
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "no text"
        problems.append(f"{item.label}: {item.value!r}: {reason}")
        return
    origin = f"file {path}"
    inputs["control_token"] = _Input(text, origin, origin, "***")


def _read_file(
    environ: Mapping[str, str], file: Path | None, problems: list[str]
) -> dict[str, _Input]:
    """Return the settings of the file; one that cannot be read, and unknown names, are problems."""
    named_by = "flag --config" if file else f"environment {CONFIG_VARIABLE}"
    path = str(file or environ.get(CONFIG_VARIABLE, ""))
    if not path:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{named_by}: {path!r}: {error.strerror}")
        return {}
    except (ValueError, yaml.YAMLError) as error:
        problems.append(f"{named_by}: {path}{_describe_fault(error)}")
        return {}
    if not isinstance(content, dict | None):
        problems.append(f"{named_by}: {path!r}: write `name: value` lines")
        return {}
    inputs = {}
    for key, value in (content or {}).items():
        label = f"file {path}, key {key}"
        if reason := _find_key_fault(str(key)):
            problems.append(f"{label}: {reason}")
        elif value is not None:
            inputs[key] = _Input(value, f"file {path}", label, _quote(key, value))
    return inputs


def _quote(name: str, value: object) -> object:
    """Return the value as a refusal of it quotes it."""
    return "***" if name in UNQUOTED else value


def _find_key_fault(key: str) -> str:
    """Return why the settings file may not have this key; empty if it may."""
    if key in SECRETS:
        return f"no place for a secret: give it as {variable_of(key)}, or as file:PATH there"
    if key not in Settings.model_fields:
        return _explain_unknown(key, list(Settings.model_fields))
    return ""


def _list_at_host(host: _Input | None) -> dict[str, _Input]:
    """Return the listeners at `listen_host`, with their default ports."""
    if host is None:
        return {}
    ports = {name: Settings.model_fields[name].default.rpartition(":")[2] for name in _LISTENERS}
    return {
        name: replace(host, value=Address("tcp", str(host.value), int(port)))
        for name, port in ports.items()
    }


def _default_triton_ports(*, is_embedded: bool) -> dict[str, _Input]:
    """Return the addresses of an embedded Triton that nobody but the adapter needs to know."""
    if not is_embedded:
        return {}
    address = "127.0.0.1:0"
    origin = "default with triton=embedded"
    item = _Input(address, origin, origin, address)
    return {"triton_http": item, "triton_grpc": item}


def _describe_fault(error: Exception) -> str:
    """Return the problem of a YAML text, after `:LINE:COLUMN` if that is known."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f": {' '.join(str(error).split())}"
    texts = [text for text in (error.context, error.problem) if text]  # type: ignore[attr-defined]
    return f":{mark.line + 1}:{mark.column + 1}: {', '.join(texts)}"


def _read_inherited(
    environ: Mapping[str, str], *, is_embedded: bool, inputs: Mapping[str, _Input]
) -> dict[str, _Input]:
    """Return the settings that SageMaker and ModelMesh set by names of their own."""
    host = str(inputs["listen_host"].value) if "listen_host" in inputs else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    names = (
        *sagemaker.inherited(environ, is_embedded=is_embedded),
        *modelmesh.inherited(environ, host),
    )
    return {
        name: _Input(value, variable, variable, environ.get(variable, value))
        for variable, name, value in names
    }


def _is_auto(inherited: Mapping[str, _Input], name: str, item: _Input) -> bool:
    """Return whether the user has left a setting of the platform at `auto`."""
    return name in inherited and item.value == "auto"


def _explain_unknown(name: str, known: list[str]) -> str:
    """Return the text about an unknown name, with the one that was probably meant."""
    bare = {known_name.removeprefix(_PREFIX): known_name for known_name in known}
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), bare, n=1)
    return f"no such setting; did you mean {bare[near[0]]}?" if near else "no such setting"


def _describe_problem(detail: "ErrorDetails", inputs: Mapping[str, _Input]) -> str:
    """Return the text about a value that pydantic refuses."""
    name = str(detail["loc"][0])
    item = inputs[name]
    inside = len(detail["loc"]) > 1  # the problem is one of several values
    written = _quote(name, detail["input"]) if inside else item.written
    is_list = detail["type"] == "tuple_type"
    if isinstance(detail.get("ctx", {}).get("error"), HoldsCredentials):
        written = "***"
    rule = "write a list" if is_list else detail["msg"].removeprefix("Value error, ")
    return f"{item.label}: {written!r}: {rule}"


def _is_switch(name: str) -> bool:
    """Return whether a setting is off by default.

    A switch changes what is served, so without a store it is an error.
    """
    return Settings.model_fields[name].default in (False, (), 0.0)


def _find_storeless(values: Mapping[str, object]) -> list[str]:
    """Return the switches among these values that need a store, if none is set."""
    if values.get("model_store") or values.get("endpoints"):
        return []
    switches = (n for n in _OF_STORES if n in values and _is_switch(n))
    return [n for n in switches if str(values[n]).lower() not in _OFF]


def _find_store_problems(values: Mapping[str, object], environ: Mapping[str, str]) -> list[str]:
    """Return the problems of variables that stores read by themselves."""
    if "s3://" not in f"{values.get('model_store')} {values.get('endpoints')}":
        return []
    return [
        f"environment {name}: {address!r}: write http://HOST:PORT or https://HOST:PORT"
        for name in _ENDPOINTS_OF_S3
        if (address := environ.get(name)) and not address.startswith(("http://", "https://"))
    ]


def _find_store_warnings(
    model_store: StoreLocation | None, endpoints: Sequence[Endpoint], inputs: Mapping[str, object]
) -> list[str]:
    """Return what may be intended, or be repaired while the adapter runs."""
    stores = [("model_store", model_store)] if model_store else []
    stores += [(f"endpoints, {each.name}", each.models) for each in endpoints]
    reasons = [(name, _explain_unusable(store)) for name, store in stores]
    found = [f"{name}: {reason}" for name, reason in reasons if reason is not None]
    if not stores:
        unused = (n for n in _OF_STORES if n in inputs and not _is_switch(n))
        found += [f"{name}: has no effect without model_store or endpoints" for name in unused]
    return found


def _explain_unusable(store: StoreLocation) -> str | None:
    """Return why a store that is a folder cannot be read now; None if it can."""
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


def _mask(name: str, value: object) -> object:
    """Return the value, or asterisks for a secret."""
    return "***" if name in SECRETS and value is not None else value


def for_programs(loaded: Loaded) -> dict[str, Any]:
    """Return each setting's value and origin as JSON values."""
    return {
        name: {"value": _to_json(_mask(name, value)), "origin": loaded.origins[name]}
        for name, value in loaded.settings
    }


def for_people(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return the name, the value and the origin of each setting.

    For a setting without a value the origin also says what that means.
    """
    rows = []
    for name, value in loaded.settings:
        origin = loaded.origins[name]
        if value is None:
            origin = f"{origin}: {as_text(name, None)}"
        rows.append((name, _format_value(name, _mask(name, value)), origin))
    return rows


def help_of(name: str) -> str:
    """Return the text of a setting for --help."""
    field = Settings.model_fields[name]
    default = as_text(name, field.default)
    return f"{field.description} (default: {default}; environment: {variable_of(name)})"


def _format_value(name: str, value: object) -> str:
    """Return a value for people, with its unit."""
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


def _to_json(value: object) -> object:
    """Return a value as JSON has it."""
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
