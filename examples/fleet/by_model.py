"""NVIDIA's tritonclient over gRPC for a fleet: each call has its model's name in its metadata.

A proxy reads headers, and over gRPC the model's name is in the message alone. Put this file beside
your program and import the clients from here; all the rest stays as it is:

    from by_model import InferenceServerClient       # for tritonclient.grpc
    from by_model import AsyncInferenceServerClient  # for tritonclient.grpc.aio

As a program it asks a model of examples/models: python by_model.py [HOST:PORT [MODEL]]
"""

import functools
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio

HEADER = "mm-model-id"  # the one that ModelMesh has; the adapter does not pass it on to Triton


def _by_model(method):
    @functools.wraps(method)
    def call(self, model_name, *args, headers=None, **options):
        headers = {**(headers or {}), HEADER: model_name}
        return method(self, model_name, *args, headers=headers, **options)

    return call


# A stream may be for several models and stays at one machine: name the model when it begins, as in
# start_stream(callback, headers={"mm-model-id": NAME}).
def _routed(client):
    """A kind of client whose calls about one model name it in their metadata."""
    names = ("infer", "async_infer", "is_model_ready", "get_model_metadata", "get_model_config")
    methods = {name: _by_model(getattr(client, name)) for name in names if hasattr(client, name)}
    return type(client.__name__, (client,), methods)


InferenceServerClient = _routed(tritonclient.grpc.InferenceServerClient)
AsyncInferenceServerClient = _routed(tritonclient.grpc.aio.InferenceServerClient)


def main(address="127.0.0.1:8080", model="identity"):
    with InferenceServerClient(address) as client:
        tensor = tritonclient.grpc.InferInput("IN", [2], "FP32")
        tensor.set_data_from_numpy(np.array([1.0, 2.0], np.float32))
        print(client.infer(model, [tensor]).as_numpy("OUT").tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
