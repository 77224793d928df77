"""The python code of docs/packages.md: it finds its helper, and opens ONNX without the backend."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.packages.models import ask, put, write_adding
from tests.running import Client, embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


def code_with(words: str) -> str:
    """The only python of the page with these words."""
    (code,) = [
        block.text
        for block in blocks(ROOT / "docs/packages.md")
        if block.language == "python" and words in block.text
    ]
    return code


def test_the_model_of_the_page_answers_when_its_package_is_loaded_twice(
    client: Client, package: Path
) -> None:
    code = code_with("triton_adapter.model.doubler")
    for name, add in (("shop", 1), ("shop2", 10)):
        write_adding(package / name / "doubler", add)
        main = write_python_model(package / name / "pipeline")
        (main / "1" / "model.py").write_text(code)
        put(client, name, package / name)

    assert [ask(client, name, 5) for name in ("shop", "shop2")] == [[6], [15]]


def test_onnx_is_served_without_its_backend(model_root: Path, package: Path) -> None:
    digits = ROOT / "examples" / "models" / "digits"
    package.mkdir(exist_ok=True)
    shutil.copy(digits / "1" / "model.onnx", package)
    (package / "model.py").write_text(code_with("import onnxruntime"))
    sample = json.loads((digits / "sample.json").read_text())
    body = {"inputs": sample["inputs"]}
    roots = (f"--model-roots={root}" for root in (model_root, digits))
    with embedded_adapter(*roots) as adapter, closing(adapter.client()) as client:
        put(client, "ours", digits)
        put(client, "pages", package)
        replies = [client.post(f"/models/{name}/invoke", body) for name in ("ours", "pages")]
    assert [reply.status for reply in replies] == [200, 200], replies[1].body
    ours, pages = (
        {output["name"].lower(): output["data"] for output in reply.json()["outputs"]}
        for reply in replies
    )
    assert pages == ours
