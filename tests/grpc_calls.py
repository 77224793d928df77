"""inference.GRPCInferenceService as any gRPC client sees it: no library between test and wire."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.trees import CONFIG

SERVICE = "inference.GRPCInferenceService"
SECONDS = 60

# for clients that mind no size
NO_LIMITS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 4 * 2**20),
)


def infer_request(name: str, *values: float, **fields: Any) -> pb.ModelInferRequest:
    """For the models of tests.trees."""
    return pb.ModelInferRequest(
        model_name=name,
        inputs=[{"name": "IN", "datatype": "FP32", "shape": [len(values)]}],
        raw_input_contents=[np.array(values, np.float32).tobytes()],
        **fields,
    )


def load_request(name: str, **parameters: object) -> pb.RepositoryModelLoadRequest:
    """Return a load of the model repository extension with these parameters."""
    request = pb.RepositoryModelLoadRequest(model_name=name)
    for key, value in parameters.items():
        kind = {bool: "bool", str: "string", bytes: "bytes", int: "int64"}[type(value)]
        setattr(request.parameters[key], f"{kind}_param", value)
    return request


def values_of(answer: pb.ModelInferResponse) -> list[float]:
    return np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()


class Calls:
    """`options` are grpc's own; by default those that clients in the field have."""

    def __init__(self, address: str, options: Sequence[tuple[str, Any]] = ()) -> None:
        self.channel = grpc.insecure_channel(address, options=list(options))
        self.answers = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name

    def call(self, method: str, request: Any, **options: Any) -> Any:
        answer = getattr(pb, self.answers[method].output_type.name)
        stub = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return stub(request, timeout=options.pop("timeout", SECONDS), **options)

    def infer(self, name: str, *values: float, **options: Any) -> list[float]:
        return values_of(self.call("ModelInfer", infer_request(name, *values), **options))

    def stream(self, requests: Any, **options: Any) -> Any:
        stub = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        return stub(iter(requests), timeout=options.pop("timeout", SECONDS), **options)

    def refused(self, method: str, request: Any, **options: Any) -> tuple[str, str]:
        """Code and text of a call that has to fail."""
        try:
            answer = self.call(method, request, **options)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(f"{method} was answered: {str(answer)[:500]}")

    def refused_infer(self, name: str, *values: float, **options: Any) -> tuple[str, str]:
        return self.refused("ModelInfer", infer_request(name, *values), **options)

    def index(self, *, ready: bool = False) -> list[tuple[str, str, str]]:
        found = self.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
        return [(model.name, model.version, model.state) for model in found.models]


@contextmanager
def calls_to(address: str, options: Sequence[tuple[str, Any]] = ()) -> Iterator[Calls]:
    calls = Calls(address, options)
    with calls.channel:
        yield calls


def write_decoupled_model(folder: Path, *, answer: str) -> Path:
    """`answer` is one expression statement block; it sees `values` and `send(values)`."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    config = CONFIG + "model_transaction_policy { decoupled: true }\n"
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(_DECOUPLED.format(answer=answer))
    return folder


_DECOUPLED = """\
import pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            sender = request.get_response_sender()

            def send(values):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]))

            {answer}
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
