"""Edits the text of a config.pbtxt, so that all else stays byte for byte.

Triton refuses a config whose name is not its folder's, and takes one without a name. Parsing and
printing the message again would drop comments, and with them every field that is newer than the
schema at hand.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

BOM = "\ufeff"

# Text format as protobuf's own tokenizer reads it: `#` comments only, no string over a line's end.
_TOKEN = re.compile(
    r"""
      (?P<blank>   [ \t\r\n\f\v]+ | \#[^\n]* )
    | (?P<string>  "(?:[^"\\\n]|\\[^\n])*" | '(?:[^'\\\n]|\\[^\n])*' )
    | (?P<word>    [A-Za-z0-9_.+-]+ )
    | (?P<mark>    . )
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_ESCAPE = re.compile(
    rb"\\(?: (?P<octal>[0-7]{1,3}) | [xX](?P<hex>[0-9a-fA-F]{1,2})"
    rb" | (?P<unicode> u[0-9a-fA-F]{4} | U000[0-9a-fA-F]{5} | U0010[0-9a-fA-F]{4} ) | (?P<one>.) )",
    re.VERBOSE | re.DOTALL,
)
_CONTROLS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_CONTROLS[b"v"] = b"\v"
_QUOTED = {code: f"\\{code:03o}" for code in (*range(0x20), 0x7F)} | {0x22: '\\"', 0x5C: "\\\\"}

_ON_CPUS = {"KIND_CPU", "2"}  # as `kind` may say it

Tokens = list[re.Match[str]]
_Edits = list[tuple[int, int, str]]


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """Says where a field stands in the tokens of a config, and in which message."""

    name: str
    parent: "Field | None"  # the field whose message it is in; None at the top
    position: int  # tokens before its name


def without_name(text: str) -> str:
    """Return a config's text without every `name: "..."` outside braces, its separator with it, and
    a byte order mark.

    Blanks and comments stay, even those inside the field, so line numbers still agree. A text with
    unbalanced braces or quotes comes back as it is: the parser has the better words for it.
    """
    tokens = tokens_of(text)
    fields = _parse_fields(tokens)
    if fields is None:
        return text
    edits: _Edits = []
    for field in fields:
        strings = _read_strings(tokens, field)
        if field.name != "name" or field.parent is not None or not strings:
            continue
        end = field.position + 2 + len(strings)
        end += _read_mark(tokens, end) in {",", ";"}
        edits += [(token.start(), token.end(), "") for token in tokens[field.position : end]]
    return _apply_edits(text, edits).removeprefix(BOM)


def rename_steps(text: str, names: Mapping[str, str]) -> str:
    """Return a config's text with other model names of the ensemble's steps; one that `names` lacks
    stays as it is.

    An unbalanced text comes back as it is.
    """
    tokens = tokens_of(text)
    edits: _Edits = []
    for field in fields_of(tokens):
        if _name_path(field) != ("ensemble_scheduling", "step", "model_name"):
            continue
        strings = _read_strings(tokens, field)
        new = names.get(_unquote(strings))
        if not strings or new is None:
            continue
        edits.append((strings[0].start(), strings[0].end(), quoted(new)))
        edits += [(string.start(), string.end(), "") for string in strings[1:]]
    return _apply_edits(text, edits)


def without_cache(text: str) -> str:
    """Return a config's text with Triton's response cache turned off, if the text turns it on. An
    unbalanced text comes back as it is.
    """
    tokens = tokens_of(text)
    edits: _Edits = []
    for field in fields_of(tokens):
        if _name_path(field) == ("response_cache", "enable"):
            value = tokens[field.position + 2]
            edits.append((value.start(), value.end(), "false"))
    return _apply_edits(text, edits)


def with_parameters(text: str, parameters: Mapping[str, str]) -> str:
    """Return a config's text with parameters appended, one a line. They overrule those of the text:
    the last of a key counts.
    """
    lines = (
        f"parameters {{ key: {quoted(key)} value {{ string_value: {quoted(value)} }} }}\n"
        for key, value in parameters.items()
    )
    return _append(text, "".join(lines))


def with_gpu(text: str, gpu: int) -> str:
    """Return a config's text in which each instance group that is not for CPUs names this GPU
    alone; add a group to a text without any. The groups name no GPUs so far. An ensemble, which has
    none, comes back as it is, and so does an unbalanced text.
    """
    tokens = tokens_of(text)
    fields = _parse_fields(tokens)
    top_level = [field for field in fields or [] if field.parent is None]
    if fields is None or any(field.name == "ensemble_scheduling" for field in top_level):
        return text
    fields_of_groups = [field for field in top_level if field.name == "instance_group"]
    groups = [message for field in fields_of_groups for message in _find_messages(tokens, field)]
    if not groups:
        return _append(text, f"instance_group {{ kind: KIND_GPU gpus: {gpu} }}\n")
    edits: _Edits = []
    for begin, end in groups:
        inner = [token[0] for token in tokens[begin:end]]
        kinds = {inner[at + 2] for at, word in enumerate(inner[:-2]) if word == "kind"}
        if kinds.isdisjoint(_ON_CPUS):
            # a number that a word follows at once would be read as a part of that word
            edits.append((tokens[begin].end(), tokens[begin].end(), f" gpus: {gpu} "))
    return _apply_edits(text, edits)


def with_tensors(text: str, inputs: str | None, outputs: str | None) -> str:
    """Return a config's text with `inputs` and `outputs`, lists such as schema.tensors_text makes,
    in place of its own.

    None or an empty text keeps what is there. An unbalanced text comes back as it is.
    """
    tokens = tokens_of(text)
    fields = _parse_fields(tokens)
    if fields is None:
        return text
    top_level = [field for field in fields if field.parent is None]
    bounds = [*(field.position for field in top_level), len(tokens)]
    edits: _Edits = []
    missing = {
        name: f"{name} {value}" for name, value in (("input", inputs), ("output", outputs)) if value
    }
    replaced = set(missing)
    for field, end in zip(top_level, bounds[1:], strict=True):
        if field.name in replaced:
            start = tokens[field.position].start()
            edits.append((start, tokens[end - 1].end(), missing.pop(field.name, "")))
    return _append(_apply_edits(text, edits), "".join(f"{field}\n" for field in missing.values()))


def tokens_of(text: str) -> Tokens:
    """Return the tokens of a config's text, all but blanks and comments, in groups string, word and
    mark, a single character.
    """
    return [token for token in _TOKEN.finditer(text) if token.lastgroup != "blank"]


def fields_of(tokens: Tokens) -> list[Field]:
    """Return every field of a config in order, parents first; none of an unbalanced text."""
    return _parse_fields(tokens) or []


def quoted(text: str) -> str:
    """Return a text as a string literal of protobuf's text format."""
    return f'"{text.translate(_QUOTED)}"'


def _parse_fields(tokens: Tokens) -> list[Field] | None:
    """Return the fields of a config's tokens, parents first; None if braces or quotes do not match.

    A word before a colon or a bracket is a name: values come before a name or a separator.
    """
    fields: list[Field] = []
    # for each open bracket: what closes it, the message it stands in, the field it belongs to
    brackets: list[tuple[str, Field | None, Field | None]] = []
    message: Field | None = None
    field: Field | None = None
    for index, token in enumerate(tokens):
        mark = token[0]
        if token.lastgroup == "word" and _read_mark(tokens, index + 1) in {":", *_CLOSING}:
            field = Field(mark, message, index)
            fields.append(field)
        elif mark in _CLOSING:
            brackets.append((_CLOSING[mark], message, field))
            message = field
        elif mark in {"}", ">", "]"}:
            if not brackets or brackets[-1][0] != mark:
                return None
            _, message, field = brackets.pop()
        elif mark in {'"', "'"}:
            return None
    return None if brackets else fields


def _name_path(field: Field) -> tuple[str, ...]:
    """Return the names that lead to the field, at most the last four."""
    names: list[str] = []
    place: Field | None = field
    while place is not None and len(names) <= 3:  # noqa: PLR2004 - nothing is sought deeper
        names.insert(0, place.name)
        place = place.parent
    return tuple(names)


def _read_strings(tokens: Tokens, field: Field) -> Tokens:
    """Return the string literals that are a field's value, as protobuf joins adjacent ones; none
    for others.
    """
    start = field.position + 2
    if _read_mark(tokens, start - 1) != ":":
        return []
    end = start
    while end < len(tokens) and tokens[end].lastgroup == "string":
        end += 1
    return tokens[start:end]


def _find_messages(tokens: Tokens, field: Field) -> Iterator[tuple[int, int]]:
    """Yield where each message of the field's value, one or a list, begins and ends."""
    depth = 0
    begin = 0
    is_list = False
    for at in range(field.position + 1, len(tokens)):
        mark = tokens[at][0]
        if mark in {"{", "<"}:
            begin = at if depth == 0 else begin
            depth += 1
        elif mark in {"}", ">"}:
            depth -= 1
            if depth == 0:
                yield begin, at
        if depth != 0:
            continue
        is_list |= mark == "["
        ends_list = mark == "]"
        ends_single_message = mark in {"}", ">"} and not is_list
        if ends_list or ends_single_message:
            return


def _unquote(strings: Tokens) -> str:
    """Return the text that string literals in a row mean, their escapes undone."""
    parts = (string[0][1:-1].encode("utf-8", "surrogatepass") for string in strings)
    return b"".join(_ESCAPE.sub(_unescape, part) for part in parts).decode("utf-8", "replace")


def _unescape(escape: re.Match[bytes]) -> bytes:
    """Return the bytes that an escape in a string literal means."""
    code = escape[escape.lastgroup or 0]
    if escape.lastgroup == "octal":
        return bytes([int(code, 8) & 0xFF])
    if escape.lastgroup == "hex":
        return bytes([int(code, 16)])
    if escape.lastgroup == "unicode":
        return chr(int(code[1:], 16)).encode("utf-8", "surrogatepass")
    return _CONTROLS.get(code, code)


def _apply_edits(text: str, edits: _Edits) -> str:
    """Return the text with its edits made: each is a start, an end, and what comes in its place;
    they are in order and do not overlap.
    """

    def pieces() -> Iterator[str]:
        """Yield the text between the edits, and what comes in place of each edited part."""
        position = 0
        for start, end, new in edits:
            yield text[position:start]
            yield new
            position = end
        yield text[position:]

    return "".join(pieces())


def _append(text: str, lines: str) -> str:
    """Append `lines` to `text`, which may end in a comment without a newline."""
    end = "\n" if lines and text and not text.endswith("\n") else ""
    return f"{text}{end}{lines}"


def _read_mark(tokens: Tokens, index: int) -> str:
    """Return the text of a token; empty behind the last one."""
    return tokens[index][0] if index < len(tokens) else ""
