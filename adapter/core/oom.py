"""Is this failure text of Triton's out of memory?

No status code of Triton says so (docs/design/triton.md): the text has to be read, and much of it
was chosen by callers or is a name. So, in this order: statuses that are never a failed allocation
are left alone; Triton's envelope goes; what stands in quotes, and paths, go; only then are the
phrases of the allocators looked for, as whole words. The phrase may be anywhere in a traceback of
hundreds of kilobytes, so every step takes time in proportion to the text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from adapter.core.oom_rules import STRONG_RULES, WEAK_RULES, Rule


class Phase(Enum):
    """Says what has failed with a text."""

    LOAD = "load"
    INFER = "infer"


class Strength(Enum):
    """Says how far a text proves a lack of memory."""

    STRONG = "strong"  # the text stands on its own
    WEAK = "weak"  # a reading of the memory has to agree
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says what a failure text tells of memory."""

    strength: Strength
    matched: str | None  # the phrase as it stood in the text, for callers
    rule: str | None  # a metric's label
    requested_bytes: int | None  # of the failed allocation; None if the text does not say
    of_shm: bool = False  # of readings only that /dev/shm was full agrees with it


_NOTHING = Verdict(Strength.NONE, None, None, None)

_BAD_REQUEST = 400
# UNKNOWN (DALI, FIL) and every failed load are 400, INTERNAL is 500, UNAVAILABLE is 503
_STATUSES_OF_FAILED_ALLOCATIONS = frozenset({_BAD_REQUEST, 500, 503})

# A text that repeats a phrase oftener than this is somebody's game, not a failure.
_MAX_TRIES = 100
_NEAR = 300

_LOAD_MARK = "load failed for model '"
_EXECUTE_MARK = re.compile(
    r"(?:in ensemble '[^']*', )*Failed to process the request\(s\) for model '"
)
_REQUEST_ID = re.compile(r"(?:in ensemble '[^']*', |\w+: )*\[request id: ")

_QUOTE = re.compile(r"['\"](?<!\w['\"])")
# A quote inside a word is an apostrophe, but b'...' opens. NCCL quotes its own words: Cuda failure
# 2 'out of memory'. A quote without an end takes all that follows, so nothing is read twice.
_QUOTED = re.compile(
    r"""'(?:(?<!\w')|(?<=\b[bBrRuUfF]'))(?<!failure\ ')(?<!failure\ \d\ ')(?!/dev/shm)
        [^'\\]*+ (?:(?:\\.?|'(?=\w)) [^'\\]*+)*+ (?:'|\Z)
    | "(?:(?<!\w")|(?<=\b[bBrRuUfF]"))(?!/dev/shm)
        [^"\\]*+ (?:(?:\\.?|"(?=\w)) [^"\\]*+)*+ (?:"|\Z)
    | `[^`\n]*` | “[^“”]*”""",
    re.VERBOSE | re.DOTALL,
)
_PATH = re.compile(r"/(?<!\w/)(?!dev/shm)[^\s:;,'\")\]]*")

_WORD_BEFORE = re.compile(r"[\w/-]")
_WORD_AFTER = re.compile(r"[\w/-]|\.[a-z]")
# Advice and text that is being quoted without quotes: not what happened.
_HEDGED = re.compile(
    r"\b(?:avoid\w*|prevent\w*|may|might|could(?! not)|would|if|unless|in case of|risk\w*"
    r"|potential\w*|possibly|without)\b[^.:;\n()]{0,60}$"
    r"|\b(?:prompt|query|question|sentence|token|label|title|topic|keyword|utterance)[ :=]*$"
)
_SURVIVED = re.compile(
    r"[^\n]{0,200}(?:falling back|fall back|fallback to|not a failure|will use cuda ipc"
    r"|pinned memory pool will not be available|no pinned memory pool)"
    r"|.{0,300}skipping (?:this )?tactic",
    re.DOTALL,
)
_RAISED = re.compile(r"\b(\w*(?:error|exception)): ")
_ABOUT_THE_INPUT = re.compile(
    r"(?:key|index|type|value|attribute|assertion|lookup|name|import|modulenotfound|filenotfound"
    r"|unicode\w+|jsondecode|validation|notimplemented|syntax)error"
)

_FIGURE = re.compile(
    r"(?:allocat(?:e|ing)|request for|requested(?: size(?: was)?| {1,20}:)?|pool size to|byte size"
    r"|gpu memory|amount of memory)"
    r" \(?(\d[\d,]{0,24}(?:\.\d{0,6})?) ?(bytes|b|[kmgt]i?b?)\b"
    r"|(?:requested bytes of|buffer of size|with byte size) (\d{1,24})\b"
)
_UNITS = "bkmgt"


class Classifier:
    """Judges failure texts."""

    def __init__(
        self,
        extra_patterns: Sequence[str] = (),  # further regexes that mean out of memory
    ) -> None:
        self._extra = tuple(_compile(pattern) for pattern in extra_patterns)

    def judge(
        self,
        text: str,
        *,
        phase: Phase,
        http_status: int,  # the status that Triton's HTTP port has, or would have
    ) -> Verdict:
        """Return what a failure text tells of memory."""
        if http_status not in _STATUSES_OF_FAILED_ALLOCATIONS:
            return _NOTHING
        refusal = phase is Phase.INFER and http_status == _BAD_REQUEST
        inner = _drop_envelope(text)
        if refusal or (phase is Phase.LOAD and not text.startswith(_LOAD_MARK)):
            inner = _drop_names(inner)
        cleaned = _PATH.sub("", _QUOTED.sub("''", inner))
        # U+0130 is the one letter that gets longer in lower case; offsets must stay equal
        low = cleaned.replace("\u0130", "I").lower()
        for rule, start, end in _find_phrases(STRONG_RULES, low, needs_figure=refusal):
            return _make_verdict(Strength.STRONG, rule.name, cleaned, (start, end))
        for pattern in self._extra:
            if match := pattern.search(cleaned):
                return _make_verdict(Strength.STRONG, "custom", cleaned, match.span())
        for rule, start, end in _find_phrases(WEAK_RULES, low, needs_figure=refusal):
            weak = _make_verdict(Strength.WEAK, rule.name, cleaned, (start, end))
            return replace(weak, of_shm=rule.of_shm)
        return _NOTHING


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    if compiled.search(""):
        raise ValueError(f"{pattern!r} matches empty text, so every failure would be out of memory")
    return compiled


def _drop_names(text: str) -> str:
    """Return the text without what Triton quotes. These are names, which may hold quotes
    themselves, so all goes from the first quote to the last.
    """
    first = _QUOTE.search(text)
    last = _QUOTE.search(text[::-1])
    if first is None or last is None:
        return text
    return text[: first.start()] + text[max(first.end(), len(text) - last.start()) :]


def _drop_envelope(text: str) -> str:
    """Return what the model or the backend said.

    Names are cut at the last place where they can end, as a name may hold the end mark itself.
    """
    if text.startswith(_LOAD_MARK):
        # a second version's text follows a line break, not a name
        text = text.rpartition("': version ")[2]
    elif _EXECUTE_MARK.match(text):
        text = text.rpartition("', message: ")[2]
    if not _REQUEST_ID.match(text):
        return text
    # a name further on may hold the end mark as well: what is read begins after both
    end = text.rfind("] ")
    quote = _QUOTE.search(text[::-1])
    return "" if end < 0 else text[max(end + 2, len(text) - quote.start() if quote else 0) :]


def _find_phrases(
    rules: tuple[Rule, ...], low: str, *, needs_figure: bool
) -> Iterator[tuple[Rule, int, int]]:
    for rule, head in ((each, head) for each in rules for head in each.heads):
        start = -1
        for _ in range(_MAX_TRIES):
            if (start := low.find(head, start + 1)) < 0:
                break
            end = _find_end(rule, low, start, start + len(head))
            if end and not (
                rule.plain and _is_no_allocation(low, start, end, needs_figure=needs_figure)
            ):
                yield rule, start, end


def _find_end(rule: Rule, low: str, start: int, end: int) -> int | None:
    """Return where the phrase that begins at `start` ends; None if these words are not it."""
    before = low[max(0, start - _NEAR) : start]
    if before and _WORD_BEFORE.match(before[-1]):
        return None
    if (tail := rule.tail.match(low, end)) is None or _WORD_AFTER.match(low, tail.end()):
        return None
    if not rule.before.search(before):
        return None
    if _HEDGED.search(before[-80:]) or _SURVIVED.match(low, tail.end()):
        return None
    return tail.end()


def _is_no_allocation(low: str, start: int, end: int, *, needs_figure: bool) -> bool:
    """Return whether a phrase that people write, too, does not mean a failed allocation here.

    With a figure of bytes near it the phrase means one. Without, it means none if a figure is
    needed, or if the error that the text names is about the input.
    """
    raised = _RAISED.findall(low, max(0, start - _NEAR), start)
    if not needs_figure and not (raised and _ABOUT_THE_INPUT.fullmatch(raised[-1])):
        return False
    return _FIGURE.search(low, start, end + _NEAR) is None


def _make_verdict(strength: Strength, rule: str, cleaned: str, span: tuple[int, int]) -> Verdict:
    """Return the verdict for the phrase at `span`. The size of the failed allocation is read from
    the text around it: the first figure behind the start of the phrase, or else before it.
    """
    start, end = span
    around = cleaned[max(0, start - _NEAR) : end + _NEAR].lower()
    figure = _FIGURE.search(around, min(start, _NEAR)) or _FIGURE.search(around)
    return Verdict(strength, cleaned[start:end].rstrip(), rule, figure and _read_bytes(figure))


def _read_bytes(figure: re.Match[str]) -> int:
    """Return the bytes, in powers of 1024 also for GB: allocators that print it mean that."""
    if figure[3]:
        return int(figure[3])
    digits = figure[1].replace(",", "")
    scale = 1024 ** _UNITS.index(figure[2][0])
    return int(float(digits) * scale) if "." in digits else int(digits) * scale
