"""Reads config.pbtxt and says what is wrong with it, by file, line and reason.

Triton itself only answers "failed to poll from model repository" (docs/design/triton.md, Failures).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.errors import InvalidModel
from adapter.packages.backends import BACKENDS_BY_PLATFORM
from adapter.packages.config_text import BOM, Field, Tokens, fields_of, tokens_of
from adapter.packages.messages import cut, did_you_mean, invalid_model, shown

# Parsing takes a second a MiB, four if all is unknown, and other threads wait meanwhile.
MAX_CONFIG_BYTES = 2**20

_MAX_REASON = 300  # characters of the parser's reason, which quotes the text
_MAX_WARNINGS = 10
_MARKS = "{}<>[]:,;/"


@dataclass(frozen=True, slots=True)
class Checked:
    """A parsed config, and what is odd in its text."""

    config: ModelConfig  # without the fields that `warnings` name
    warnings: tuple[str, ...]


def read_config(path: Path) -> str:
    """Return the text of a config.pbtxt as it is, with any byte order mark. Raise InvalidModel if
    the file is no text or too large, or the OSError of the disk.
    """
    with path.open("rb") as file:
        return decode(file.read(MAX_CONFIG_BYTES + 1), path)


def decode(raw: bytes, path: Path) -> str:
    """Return the text of a config.pbtxt. Raise InvalidModel, which names `path`, if the file is too
    large, empty or no UTF-8.
    """
    if len(raw) > MAX_CONFIG_BYTES:
        raise invalid_model(path, f"it is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is 0x{raw[error.start]:02x}"
        raise invalid_model(path, f"it is not valid UTF-8: {reason}") from error
    if not text.removeprefix(BOM).strip():
        raise invalid_model(path, "it is empty")
    return text


def parse(text: str, path: Path) -> Checked:
    """Parse the text of a config.pbtxt. Unknown fields become warnings of the result, as newer
    Tritons have newer fields.

    Raises InvalidModel for anything else that is not a model's configuration. `path` is for
    messages.
    """
    tokens = tokens_of(text.removeprefix(BOM))
    lines = list(_split_lines(tokens))
    config = ModelConfig()
    try:
        # One token a line: each guess at an unknown field's type quotes the line, and a long line
        # with many of them would take minutes.
        text_format.Parse("\n".join(lines), config, allow_unknown_field=True)
    except text_format.ParseError as error:
        raise _make_error(error, tokens, lines, path) from error
    except RecursionError as error:
        raise invalid_model(path, "it is nested too deeply") from error
    _refuse_stray(tokens, path)
    return Checked(config, _make_warnings(tokens, path))


def _split_lines(tokens: Tokens) -> Iterator[str]:
    """Yield a line for each token. A minus that stands alone moves to the number behind it:
    Triton's parser allows blanks between the two, Python's does not.
    """
    texts = [token[0] for token in tokens]
    sign = ""
    for text, following in pairwise([*texts, ""]):
        is_lone_minus = text == "-" and following[:1].isalnum()
        yield "" if is_lone_minus else sign + text
        sign = "-" if is_lone_minus else ""


def _make_error(
    error: text_format.ParseError, tokens: Tokens, lines: Sequence[str], path: Path
) -> InvalidModel:
    """Return the parser's error with line and column of the file. Its own text begins with a place
    and a line, which are the number of a token and the token.
    """
    number = error.GetLine()
    column = error.GetColumn()
    if number is None or column is None:
        return invalid_model(path, cut(str(error), _MAX_REASON))
    reason = str(error).removeprefix(f"{number}:{column} : ")
    token = tokens[number - 1]
    # past the end of the text it quotes an empty line
    for quoted in ("", lines[number - 1]):
        reason = reason.removeprefix(f"'{quoted}': ")
    line, start = _locate(token)
    # only a known message may be a list without a colon
    before = [each for each in _find_unknown(tokens) if each[0].position == number - 2]
    why = "; ".join(_explain_unknown(*each) for each in before)
    return invalid_model(f"{path}:{line}:{start + column - 1}", why or cut(reason, _MAX_REASON))


def _refuse_stray(tokens: Tokens, path: Path) -> None:
    """Refuse characters at which Triton's parser stops, but not Python's (seen on 2.51).

    A no-break space pasted from a web page is one of them.
    """
    for token in tokens:
        if token.lastgroup == "mark" and token[0] not in _MARKS:
            line, column = _locate(token)
            fault = f"character U+{ord(token[0]):04X} outside strings and comments"
            raise invalid_model(f"{path}:{line}:{column}", fault)


def _locate(token: re.Match[str]) -> tuple[int, int]:
    """Return where a token begins: its line and, in characters, its column, both from 1 on."""
    text = token.string
    start = token.start()
    return text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)


def _make_warnings(tokens: Tokens, path: Path) -> tuple[str, ...]:
    """Return a warning for each unknown field, up to ten, and one that counts those beyond."""
    unknown = _find_unknown(tokens)
    warnings = [
        f"{shown(path)}:{_locate(tokens[field.position])[0]}: {_explain_unknown(field, names)}"
        for field, names in unknown[:_MAX_WARNINGS]
    ]
    if (more := len(unknown) - _MAX_WARNINGS) > 0:
        warnings.append(f"{shown(path)}: {more} more fields are not known to this version's schema")
    return tuple(warnings)


def _explain_unknown(field: Field, names: Iterable[str]) -> str:
    """Return that a field is unknown, and which of `names`, those of its message, may be meant."""
    proposal = did_you_mean([field.name], names)
    return f"field {cut(field.name)!r} is not known to this version's schema{proposal}"


def _find_unknown(tokens: Tokens) -> list[tuple[Field, Iterable[str]]]:
    """Return the fields of a config that its schema lacks, each with the names that its message
    knows.

    Fields within an unknown field are not listed.
    """
    messages: dict[Field | None, Any] = {None: ModelConfig.DESCRIPTOR}
    unknown = []
    for field in fields_of(tokens):
        message = messages.get(field.parent)
        if message is None:
            continue
        if (known := message.fields_by_name.get(field.name)) is None:
            unknown.append((field, message.fields_by_name))
        else:
            messages[field] = known.message_type
    return unknown


def is_ensemble(config: ModelConfig) -> bool:
    """Return whether a config describes an ensemble, which no backend runs."""
    return bool(config.platform == "ensemble" or config.HasField("ensemble_scheduling"))


def backend_of(config: ModelConfig) -> str | None:
    """Return the name of a config's backend; None if Triton detects it, and for ensembles, which
    need none.
    """
    if is_ensemble(config):
        return None
    return config.backend or BACKENDS_BY_PLATFORM.get(config.platform)


def explain_unknown_platform(config: ModelConfig) -> str | None:
    """Return a warning about a `platform` that no Triton of today knows; None if it is known, or
    if the config has a `backend`, which then decides.
    """
    known = {*BACKENDS_BY_PLATFORM, "ensemble"}
    if not config.platform or config.backend or config.platform in known:
        return None
    proposal = (
        did_you_mean([config.platform], known) or "; to name a backend, the field is `backend`"
    )
    return f"platform {cut(config.platform)!r} is not known{proposal}"
