"""The python code of docs/packages.md finds its helper, under whichever name that is."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.packages.models import ask, put, write_adding
from tests.running import Client
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


def test_the_model_of_the_page_answers_when_its_package_is_loaded_twice(
    client: Client, package: Path
) -> None:
    (code,) = [b.text for b in blocks(ROOT / "docs/packages.md") if b.language == "python"]
    for name, add in (("shop", 1), ("shop2", 10)):
        write_adding(package / name / "doubler", add)
        main = write_python_model(package / name / "pipeline")
        (main / "1" / "model.py").write_text(code)
        put(client, name, package / name)

    assert [ask(client, name, 5) for name in ("shop", "shop2")] == [[6], [15]]
