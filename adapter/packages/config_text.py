"""The edits to config.pbtxt, made in the text so that all else stays byte for byte.

Triton refuses a config whose name is not its folder's, and takes one without a name (sagemaker.md
section 5). Parsing and printing the message again would drop comments, and with them every field
that is newer than the schema at hand.
"""

import re

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

_Tokens = list[re.Match[str]]


def without_name(text: str) -> str:
    """Drop every `name: "..."` outside braces, its separator with it, and a byte order mark.

    Blanks and comments stay, even those inside the field, so line numbers still agree. A text
    with unbalanced braces or quotes comes back as it is: the parser has the better words for it.
    """
    tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup != "blank"]
    top_level = _top_level(tokens)
    if top_level is None:
        return text
    kept, position = [], 0
    for token in _name_fields(tokens, top_level):
        kept.append(text[position : token.start()])
        position = token.end()
    return ("".join(kept) + text[position:]).removeprefix(BOM)


def _top_level(tokens: _Tokens) -> list[bool] | None:
    """For each token whether it lies outside all braces; None when they do not match up."""
    expected: list[str] = []
    result = []
    for token in tokens:
        mark = token[0]
        if mark in {'"', "'"}:
            return None
        if mark in {"}", ">", "]"} and (not expected or expected.pop() != mark):
            return None
        result.append(not expected)
        if mark in _CLOSING:
            expected.append(_CLOSING[mark])
    return None if expected else result


def _name_fields(tokens: _Tokens, top_level: list[bool]) -> _Tokens:
    """The tokens to drop, in order."""
    found: _Tokens = []
    for index, token in enumerate(tokens):
        if token[0] != "name" or not top_level[index] or _mark(tokens, index + 1) != ":":
            continue
        end = index + 2
        while end < len(tokens) and tokens[end].lastgroup == "string":
            end += 1
        if end == index + 2:
            continue
        if _mark(tokens, end) in {",", ";"}:
            end += 1
        found += tokens[index:end]
    return found


def _mark(tokens: _Tokens, index: int) -> str:
    return tokens[index][0] if index < len(tokens) else ""
