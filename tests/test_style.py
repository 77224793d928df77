"""scripts/check_style.py finds each pattern once in a sample, and nothing in good code."""

import ast
from collections import Counter

import pytest

from scripts.check_style import ROOT, compare, find_all

SAMPLE = '''
class Legend:
    """Holds `a`. `b` is big. `c`: small."""


def starts():
    """`seconds`: how long."""


def fragment():
    """Of all that there is."""


def goes_on():
    """Continue."""
    self.a, self.b = 1, 2
    call(*(1, 2))
    # it is late
    if ready and (late := find()):
        return late


def test_a_name_that_is_so_long_that_nobody_will_read_it_to_the_very_end():
    """Pass."""


def undocumented():
    pass
'''
PATTERNS = (
    "class-legend",
    "doc-starts-with-parameter",
    "doc-fragment",
    "name-clause",
    "fields-on-one-line",
    "packed-arguments",
    "comment-riddle",
    "buried-walrus",
    "test-name",
    "undocumented",
)
GOOD = '''
class Cache:
    """Keeps the latest answers."""

    def find(self, name: str) -> str | None:
        """Return the answer of a name, or None."""
        # the lock is held by the caller
        if (answer := self._answers.get(name)) is not None:
            return answer
        return None
'''


def patterns_in(source: str) -> Counter[str]:
    findings = find_all(ROOT / "adapter" / "sample.py", source, ast.parse(source))
    return Counter(finding.pattern for finding in findings)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_pattern_is_found_once(pattern):
    assert patterns_in(SAMPLE)[pattern] == 1


def test_plain_code_has_no_finding():
    assert patterns_in(GOOD) == {}


def test_a_count_may_fall_and_not_grow():
    known = {"adapter/core": {"doc-fragment": 2}}

    assert compare({"adapter/core": {"doc-fragment": 1}}, known) == []
    assert compare({"adapter/core": {"doc-fragment": 3}}, known) == [
        "adapter/core: doc-fragment: 3, was 2"
    ]
    assert compare({"adapter/new": {"name-clause": 1}}, known) == [
        "adapter/new: name-clause: 1, was 0"
    ]
