"""The texts that docs/operations.md quotes under Symptoms are texts of the adapter."""

import re

from adapter.settings import Settings, variable_of
from adapter.telemetry.log import EVENTS
from adapter.telemetry.metrics import Metrics
from tests.docs.pages import ROOT

SOURCES = [path.read_text(encoding="utf-8") for path in (ROOT / "adapter").rglob("*.py")]
# literals that stand side by side are one text
CODE = re.sub(r'"\s*\n\s*f?"', "", "\n".join(SOURCES))
METRICS = {family.name for family in Metrics().registry.collect()}
NAMES = {*EVENTS, *METRICS, *Settings.model_fields, *map(variable_of, Settings.model_fields)}
# words of grpc, Triton, ModelMesh and the operating system, and names that stand for others
FOREIGN = {
    *("message larger than max", "address already in use", "Repository*", "/dev/shm"),
    "output tensor shape does not match size of output",
    *("Entry too old for cache", "retry iterations exhausted"),
}

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
TEXT = PAGE.partition("\n## First look\n")[2].partition("\n## Runbooks\n")[0]
QUOTED = sorted(
    {
        quoted
        for row in re.findall(r"^\| (.*?) \|", TEXT, re.MULTILINE)
        for quoted in re.findall(r"`([^`]+)`", row)
    }
)


def is_said(quoted: str) -> bool:
    """A single word stands in code for many things: it must be a text of its own."""
    said = f'"{quoted}"' if re.fullmatch(r"\w+", quoted) else quoted
    return quoted in NAMES | FOREIGN or said in CODE


def test_quoted_symptoms_are_the_adapters_texts() -> None:
    assert len(QUOTED) > 30
    assert [quoted for quoted in QUOTED if not is_said(quoted)] == []
