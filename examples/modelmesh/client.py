"""What ModelMesh does with the adapter, step by step. It asks the listener itself for its messages.

python client.py 127.0.0.1:8085 identity /opt/ml/models/identity
"""

import argparse
import json
import sys
import time

import grpc
import numpy as np
import tritonclient.grpc as triton
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICE = "mmesh.ModelRuntime"


class Runtime:
    """The calls of mmesh.ModelRuntime, as the listener describes them by reflection."""

    def __init__(self, channel):
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        self._methods = pool.FindServiceByName(SERVICE).methods_by_name
        self._channel = channel

    def call(self, name, seconds=None, **fields):
        method = self._methods[name]
        request = GetMessageClass(method.input_type)(**fields)
        answer = GetMessageClass(method.output_type)
        rpc = self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return rpc(request, timeout=seconds)

    def begin(self):
        """What a mesh asks at its start, until it is READY. It unloads whatever is loaded."""
        while (status := self.call("runtimeStatus", seconds=30)).status != 1:
            time.sleep(0.5)
        return status


def infer(address, model_id, values):
    """The header says which model is meant; the name in the request may be anything."""
    tensor = triton.InferInput("IN", [len(values)], "FP32")
    tensor.set_data_from_numpy(np.array(values, np.float32))
    with triton.InferenceServerClient(address) as client:
        answer = client.infer("any-name", [tensor], headers={"mm-model-id": model_id})
    return answer.as_numpy("OUT").tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="HOST:PORT or unix:/path of the grpc listener")
    parser.add_argument("model_id")
    parser.add_argument("path", help="a package that answers IN with OUT, such as identity")
    parser.add_argument(
        "--unload-all",
        action="store_true",
        help="begin as a mesh does at its start, by runtimeStatus: it unloads every model",
    )
    args = parser.parse_args()
    key = json.dumps({"model_type": {"name": "python"}})
    about = {"modelId": args.model_id, "modelPath": args.path, "modelKey": key}

    with grpc.insecure_channel(args.address) as channel:
        runtime = Runtime(channel)
        if args.unload_all:
            status = runtime.begin()
            print(f"Triton {status.runtimeVersion}, {status.capacityInBytes} bytes for models")
        predicted = runtime.call("predictModelSize", seconds=0.5, **about).sizeInBytes
        print(f"{args.model_id} is expected to take {predicted} bytes")
        size = runtime.call("loadModel", **about).sizeInBytes
        size = size or runtime.call("modelSize", seconds=30, modelId=args.model_id).sizeInBytes
        print(f"{args.model_id} is loaded and takes {size} bytes")
        print(f"{args.model_id} answers {infer(args.address, args.model_id, [1.0, 2.5])}")
        runtime.call("unloadModel", modelId=args.model_id)
        print(f"{args.model_id} is unloaded")


if __name__ == "__main__":
    sys.exit(main())
