"""Trains examples/models/digits: writes 1/model.onnx and sample.json, prints the test accuracy.

Run it in a virtual environment of its own with requirements/train.txt installed; the results are
committed, so only a change of the model needs it. The seed is fixed: the same package versions
give the same numbers.
"""

import json
import sys
from pathlib import Path

import numpy as np
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "digits"
SEED = 20
SAMPLES = 8
LOWEST_ACCURACY = 0.95
# Old enough for every onnxruntime that pyproject.toml admits.
OPSET = 17


def main() -> int:
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images.astype(np.float32), labels, test_size=0.25, random_state=SEED, stratify=labels
    )
    classifier = make_pipeline(
        MinMaxScaler(), MLPClassifier(hidden_layer_sizes=(64,), max_iter=1000, random_state=SEED)
    )
    classifier.fit(train_x, train_y)
    accuracy = classifier.score(test_x, test_y)
    print(f"{len(train_x)} training images, {len(test_x)} test images, accuracy {accuracy:.4f}")
    if accuracy < LOWEST_ACCURACY:
        print(f"below {LOWEST_ACCURACY}: nothing written", file=sys.stderr)
        return 1
    write_model(classifier)
    write_sample(test_x[:SAMPLES], test_y[:SAMPLES])
    return 0


def write_model(classifier: Pipeline) -> None:
    model = to_onnx(
        classifier,
        name="digits",
        initial_types=[("IMAGE", FloatTensorType([None, 64]))],
        options={"zipmap": False},  # probabilities as one tensor, not a list of maps
        target_opset=OPSET,
    )
    (MODEL / "1" / "model.onnx").write_bytes(model.SerializeToString())


def write_sample(images: np.ndarray, labels: np.ndarray) -> None:
    """A request that can be posted as it is; Triton passes over the key `labels`."""
    tensor = {
        "name": "IMAGE",
        "datatype": "FP32",
        "shape": list(images.shape),
        "data": [row.astype(int).tolist() for row in images],
    }
    wanted = [{"name": "LABEL"}]
    text = json.dumps({"labels": labels.tolist(), "outputs": wanted, "inputs": [tensor]})
    (MODEL / "sample.json").write_text(text + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
