"""Where values come from: the sources, their order, and all that is wrong with them at once."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from adapter.errors import InvalidSettings
from adapter.settings import modelmesh, sagemaker
from adapter.settings.model import Settings
from adapter.settings.naming import flag_of, variable_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

CONFIG_VARIABLE = "ADAPTER_CONFIG"
_PREFIX = "ADAPTER_"
# What Kubernetes sets in every container of a namespace with a Service named adapter or adapter-*.
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?=.*|\w+_PORT=\w+://.*"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """`origins` has every setting's name: `flag --http`, `environment ADAPTER_HTTP`, `default`."""

    settings: Settings
    origins: dict[str, str]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value, where it is from, how the user wrote it, and the words to complain about it."""

    value: object
    origin: str
    label: str
    written: object


def load_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None
) -> Loaded:
    """Merge all sources. None and an empty variable count as not given.

    Raises InvalidSettings with every problem of every source.
    """
    problems = modelmesh.problems(environ)
    given = {
        **_from_file(environ, file, problems),
        **_from_environment(environ, problems),
        **_from_flags(flags),
    }
    is_embedded = "triton" in given and given["triton"].value == "embedded"
    problems += sagemaker.problems(environ, is_embedded=is_embedded)
    given = {**_inherited(environ, is_embedded=is_embedded), **given}
    try:
        settings = Settings.model_validate({name: item.value for name, item in given.items()})
    except ValidationError as error:
        problems += [_problem(detail, given) for detail in error.errors()]
        raise InvalidSettings(problems) from error
    if problems:
        raise InvalidSettings(problems)
    origins = {n: given[n].origin if n in given else "default" for n in Settings.model_fields}
    return Loaded(settings, origins, modelmesh.warnings(environ) + sagemaker.warnings(environ))


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Given]:
    return {
        name: _Given(value, origin := f"flag {flag_of(name)}", origin, value)
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
                problems.append(f"environment {variable}: {value!r}: {advice}")
        elif value:
            origin = f"environment {variable}"
            found[name] = _Given(value, origin, origin, value)
    return found


def _from_file(
    environ: Mapping[str, str], file: Path | None, problems: list[str]
) -> dict[str, _Given]:
    named_by = "flag --config" if file else f"environment {CONFIG_VARIABLE}"
    if (path := str(file or environ.get(CONFIG_VARIABLE, ""))) == "":
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"{named_by}: {path!r}: {' '.join(str(error).split())}")
        return {}
    if not isinstance(content, dict | None):
        problems.append(f"{named_by}: {path!r}: write `name: value` lines")
        return {}
    found = {}
    for key, value in (content or {}).items():
        label = f"file {path}, key {key}"
        if key not in Settings.model_fields:
            problems.append(
                f"{label}: {value!r}: {_no_such(str(key), list(Settings.model_fields))}"
            )
        elif value is not None:
            found[key] = _Given(value, f"file {path}", label, value)
    return found


def _inherited(environ: Mapping[str, str], *, is_embedded: bool) -> dict[str, _Given]:
    """Names that SageMaker and ModelMesh set; a value that several of them make is shown whole."""
    names = (
        *sagemaker.inherited(environ, is_embedded=is_embedded),
        *modelmesh.inherited(environ),
    )
    return {
        name: _Given(value, variable, variable, environ.get(variable, value))
        for variable, name, value in names
    }


def _no_such(name: str, known: list[str]) -> str:
    bare = {known_name.removeprefix(_PREFIX): known_name for known_name in known}
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), bare, n=1)
    return f"no such setting; did you mean {bare[near[0]]}?" if near else "no such setting"


def like_flag(unknown: str) -> str:
    """The end of a sentence about a flag that there is not: which setting's may be meant."""
    flags = [flag_of(name) for name in Settings.model_fields]
    near = difflib.get_close_matches(unknown.partition("=")[0], flags, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _problem(detail: "ErrorDetails", given: Mapping[str, _Given]) -> str:
    name = str(detail["loc"][0])
    item = given[name]
    inside = len(detail["loc"]) > 1  # one of several values
    written = detail["input"] if inside else item.written
    return f"{item.label}: {written!r}: {detail['msg'].removeprefix('Value error, ')}"
