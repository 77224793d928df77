"""The python code that docs/packages.md has or links to answers when it is loaded."""

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

WITHOUT_BACKEND = ROOT / "examples" / "without_backend"


def read_python_block() -> str:
    """Return the text of the only block of python on the page."""
    (code,) = [
        block.text for block in blocks(ROOT / "docs/packages.md") if block.language == "python"
    ]
    return code


def test_pages_model_answers_when_loaded_twice(client: Client, package: Path) -> None:
    code = read_python_block()
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
    shutil.copy(WITHOUT_BACKEND / "onnx_model.py", package / "model.py")
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


# A model of opset 17 that answers with its texts: `Identity` of IN [N] as OUT.
_TEXTS = """
08083a3f0a130a02494e12034f555422084964656e746974791201675a110a02494e120b0a09080812050a0312014e
62120a034f5554120b0a09080812050a0312014e42040a001011
"""


def test_onnx_of_texts_is_served_without_backend(model_root: Path, package: Path) -> None:
    package.mkdir(exist_ok=True)
    (package / "model.onnx").write_bytes(bytes.fromhex(_TEXTS))
    shutil.copy(WITHOUT_BACKEND / "onnx_model.py", package / "model.py")
    texts = ["a", "", "größer"]
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [3], "data": texts}
    with (
        embedded_adapter(f"--model-roots={model_root}") as adapter,
        closing(adapter.client()) as client,
    ):
        put(client, "texts", package)
        reply = client.post("/models/texts/invoke", {"inputs": [tensor]})
    assert reply.status == 200, reply.body
    assert reply.data == texts


# The stand-in for joblib, as far as the recipe uses it, and for a model that it loads.
_JOBLIB = """
class Sum:
    n_features_in_ = 2

    def predict(self, rows):
        return rows.sum(axis=1)


def load(file):
    assert file.read_text() == "a model"
    return Sum()
"""


def test_scikit_learn_is_served_by_python(tmp_path: Path) -> None:
    """Serve a stand-in for it: tests/nightly/test_gallery.py has scikit-learn itself."""
    package = tmp_path / "sum"
    package.mkdir()
    (package / "joblib.py").write_text(_JOBLIB)
    (package / "model.joblib").write_text("a model")
    shutil.copy(WITHOUT_BACKEND / "sklearn_model.py", package / "model.py")
    rows = {"name": "X", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
    roots = f"--model-roots={tmp_path}"
    with embedded_adapter(roots) as adapter, closing(adapter.client()) as client:
        put(client, "sum", package)
        reply = client.post("/models/sum/invoke", {"inputs": [rows]})
    assert reply.status == 200, reply.body
    [output] = reply.json()["outputs"]
    assert (output["name"], output["shape"]) == ("Y", [2])
    assert output["data"] == pytest.approx([3, 7], abs=1e-4)
