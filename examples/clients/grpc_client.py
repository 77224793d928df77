"""NVIDIA's tritonclient over gRPC, pointed at the adapter: python grpc_client.py [HOST:PORT]"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

SAMPLE = Path(__file__).parents[1] / "models" / "digits" / "sample.json"


async def main(address="127.0.0.1:8085"):
    sample = json.loads(SAMPLE.read_text())
    images = np.array(sample["inputs"][0]["data"], np.float32)

    async with InferenceServerClient(address) as client:
        print("server:", (await client.get_server_metadata()).name)

        # the folder digits of a model root; RESOURCE_EXHAUSTED where it does not fit
        await client.load_model("digits")

        tensor = InferInput("IMAGE", images.shape, "FP32")
        tensor.set_data_from_numpy(images)
        result = await client.infer("digits", [tensor], client_timeout=10)
        print("labels:", result.as_numpy("LABEL").tolist(), "truth:", sample["labels"])

        # the same by the header that ModelMesh sets: it names the model whatever the request says
        by_header = await client.infer("any", [tensor], headers={"mm-model-id": "digits"})
        print("again:", by_header.as_numpy("LABEL").tolist())

        await client.unload_model("digits")
        try:
            await client.infer("digits", [tensor])
        except InferenceServerException as error:
            print("unloaded:", error.status(), error.message())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
