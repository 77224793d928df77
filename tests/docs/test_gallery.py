"""The ONNX example of the gallery, which nothing here can run, has the tensors of its file."""

import onnxruntime
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.docs.pages import ROOT

FOLDER = ROOT / "examples" / "gallery" / "onnx"
TYPES = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64"}


def test_onnx_example_names_its_files_tensors() -> None:
    text = (FOLDER / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    session = onnxruntime.InferenceSession(FOLDER / "1" / "model.onnx")
    of_file = [*session.get_inputs(), *session.get_outputs()]
    of_config = [*config.input, *config.output]

    assert [(t.name, TYPES[t.type]) for t in of_file] == [
        (t.name, model_config_pb2.DataType.Name(t.data_type)) for t in of_config
    ]
    # the first dimension of the file is the batch, which the config leaves out
    assert [list(t.shape[1:]) for t in of_file] == [
        list(t.reshape.shape if t.HasField("reshape") else t.dims) for t in of_config
    ]
