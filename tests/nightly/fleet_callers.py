"""The ways to ask a fleet, through Envoy: the endpoint, V2 over REST, and V2 over gRPC."""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPException

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.fleet.envoy import RunningEnvoy
from tests.running import Client
from tests.trees import infer_body

NOBODY = "nobody"
WAYS = ("endpoint", "REST", "gRPC")


@dataclass(frozen=True)
class Answer:
    """What a call was told: a status, a code of gRPC, or `nobody` that answered. `added` is the
    value of an answer that has one.
    """

    told: str
    text: str
    added: float | None = None


class Ways:
    """One connection for HTTP and one for gRPC, made anew for a new Envoy, and after nobody has
    answered: gRPC would not look again for seconds.
    """

    def __init__(self, envoy: RunningEnvoy) -> None:
        self._envoy = envoy
        self._process: object = None
        self._connections = ExitStack()

    def ask(self, way: str, model: str, value: float) -> Answer:
        if self._process is not self._envoy.process:
            self._connect()
        answer = (
            _by_grpc(self._grpc, model, value)
            if way == "gRPC"
            else _over_http(self._http, *_PATHS[way](model), model, value)
        )
        if answer.told == NOBODY:
            self._process = None
        return answer

    def _connect(self) -> None:
        self.close()
        self._process, address = self._envoy.process, self._envoy.address
        self._http = self._connections.enter_context(closing(Client(address, timeout=100)))
        own = [("grpc.use_local_subchannel_pool", 1)]
        client = grpcclient.InferenceServerClient(address, channel_args=own)
        self._grpc = self._connections.enter_context(closing(client))

    def close(self) -> None:
        self._connections.close()


_PATHS = {
    "endpoint": lambda model: (
        "/endpoints/any/invocations",
        {"X-Amzn-SageMaker-Target-Model": model},
    ),
    "REST": lambda model: (f"/v2/models/{model}/infer", {}),
}


def _over_http(
    client: Client, path: str, headers: dict[str, str], model: str, value: float
) -> Answer:
    try:
        reply = client.post(path, infer_body(value), headers=headers)
    except (OSError, HTTPException) as error:
        return Answer(NOBODY, repr(error))
    if reply.status != 200:
        return Answer(str(reply.status), reply.body.decode(errors="replace")[:300])
    body = reply.json()
    assert body["model_name"] == model, body
    [out] = [each["data"] for each in body["outputs"] if each["name"] == "OUT"]
    return Answer(reply.headers.get("X-Triton-Adapter-Cache", "200"), "", out[0])


def _by_grpc(client: grpcclient.InferenceServerClient, model: str, value: float) -> Answer:
    tensor = grpcclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([value], np.float32))
    try:
        reply = client.infer(model, [tensor], headers={"mm-model-id": model}, client_timeout=100)
    except InferenceServerException as error:
        text = str(error.message())[:300]
        is_nobody = text.startswith("failed to connect")
        return Answer(NOBODY if is_nobody else str(error.status()).rpartition(".")[2], text)
    assert reply.get_response().model_name == model
    return Answer("OK", "", float(reply.as_numpy("OUT")[0]))
