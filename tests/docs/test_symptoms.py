"""What docs/troubleshooting.md quotes is what the adapter says."""

import re

import pytest

from adapter.log import EVENTS
from adapter.settings import Settings, variable_of
from tests.docs.pages import ROOT

SOURCES = [
    path.read_text(encoding="utf-8")
    for path in [*(ROOT / "adapter").rglob("*.py"), *(ROOT / "tests" / "data").iterdir()]
]
# literals that stand side by side are one text
CODE = re.sub(r'"\s*\n\s*f?"', "", "\n".join(SOURCES))
NAMES = {*EVENTS, *Settings.model_fields, *map(variable_of, Settings.model_fields)}
# words of grpc and of the operating system, and names that stand for others
FOREIGN = {"message larger than max", "address already in use", "Repository*", "/dev/shm"}

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = sorted(
    {
        quoted
        for row in re.findall(r"^\| (.*?) \|", TEXT, re.MULTILINE)
        for quoted in re.findall(r"`([^`]+)`", row)
    }
)


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_a_symptom_quotes_is_said_by_the_adapter(quoted: str) -> None:
    assert quoted in NAMES | FOREIGN or quoted in CODE
