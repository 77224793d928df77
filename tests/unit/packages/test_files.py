"""What must lie beside a config.pbtxt."""

import pytest

from tests.unit.packages.looking import look, make, refusal


@pytest.mark.parametrize(
    "name", [str(2**63), "-" + "9" * 30, "20260101000000000000-old", " +" + "9" * 20]
)
def test_folder_name_that_would_end_triton_is_refused(name, root):
    folder = make(root / "m", files=["1/model.py", f"{name}/x"])
    assert f"/{name}: a version number must be below 2**63" in refusal(folder, root)


def test_the_largest_version_is_accepted(root):
    assert look(make(root / "m", files=[f"{2**63 - 1}/model.py"]), root)


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ('backend: "python"', "model.py"),
        ('backend: "onnxruntime"', "model.onnx"),
        ('platform: "onnxruntime_onnx"', "model.onnx"),
        ('backend: "tensorrt"', "model.plan"),
        ('platform: "tensorrt_plan"', "model.plan"),
        ('backend: "pytorch"', "model.pt"),
        ('platform: "pytorch_libtorch"', "model.pt"),
        ('backend: "tensorflow"', "model.savedmodel/saved_model.pb"),
        ('backend: "tensorflow"', "model.graphdef"),
        ('platform: "tensorflow_savedmodel"', "model.savedmodel/saved_model.pb"),
        ('platform: "tensorflow_graphdef"', "model.graphdef"),
        ('backend: "openvino"', "model.xml"),
        ('backend: "python" default_model_filename: "main.py"', "main.py"),
    ],
)
def test_one_version_must_hold_file_that_backend_needs(config, file, root):
    folder = make(root / "m", config, files=["1/other", f"2/{file}"])
    assert look(folder, root)
    (folder / "2").rename(folder / "old")
    text = refusal(folder, root)
    assert file.partition("/")[0] in text
    assert "in version 1;" in text


@pytest.mark.parametrize(
    "config",
    [
        "max_batch_size: 8",
        'backend: "identity"',
        'backend: "identity" default_model_filename: "x"',
        'backend: "pytorch" platform: "torch_aoti"',
        'backend: "tensorrt" cc_model_filenames { key: "9.0" value: "h.plan" }',
        'backend: "pytorch" runtime: "model.py"',
        'backend: "onnxruntime" runtime: "libmine.so"',
    ],
)
def test_uncertain_faults_are_left_to_triton(config, root):
    assert look(make(root / "m", config, files=["1/model.bin"]), root)


def test_file_is_needed_when_runtime_is_usual_one(root):
    """Triton writes the library that it has chosen into the config that it shows."""
    config = 'backend: "pytorch" runtime: "libtriton_pytorch.so"'
    text = refusal(make(root / "m", config, files=["1/model.bin"]), root)
    assert "model.pt in version 1" in text
