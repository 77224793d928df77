"""Checks that the time constants are few, and that each has its reason."""

import re
from pathlib import Path

from adapter.core import times

SOURCE = Path(times.__file__).read_text(encoding="utf-8")
NAMES = [name for name in vars(times) if name.isupper()]
MAX_CONSTANTS = 15


def test_constants_are_at_most_fifteen():
    assert 0 < len(NAMES) <= MAX_CONSTANTS
    assert all(name.endswith("_SECONDS") for name in NAMES)


def test_constant_has_its_reason_above_it():
    for name in NAMES:
        assert re.search(rf"^# .+\n{name} = [\d.]+$", SOURCE, re.MULTILINE), name


def test_no_other_module_has_a_constant():
    """Apart from what a refused caller is told of when to ask again."""
    folder = Path(times.__file__).parent
    constant = re.compile(r"^(?!_RETRY_)_?[A-Z_]*(?:SECONDS|_MS)\w* *[:=]", re.MULTILINE)
    sources = {path.name: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    assert [name for name, text in sources.items() if constant.search(text)] == ["times.py"]
