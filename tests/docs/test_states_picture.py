"""The states that a page draws are those of the code."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PICTURE = re.compile(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_picture_on_the_page_of_the_endpoint_is_the_one_made_of_the_code() -> None:
    page = (DOCS / "endpoint.md").read_text()
    [drawn] = PICTURE.findall(page)
    assert drawn in PICTURE.findall((DOCS / "states.md").read_text())
    rows = page.partition("| state | where the model is |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| (\w+) \|", rows, re.MULTILINE)) == set(
        re.findall(r"[A-Z_]{4,}", drawn)
    )
