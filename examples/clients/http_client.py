"""NVIDIA's tritonclient over HTTP, pointed at the adapter: python http_client.py [HOST:PORT]"""

import json
import sys
from pathlib import Path

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

SAMPLE = Path(__file__).parents[1] / "models" / "digits" / "sample.json"


def main(address="127.0.0.1:8080"):
    sample = json.loads(SAMPLE.read_text())
    images = np.array(sample["inputs"][0]["data"], np.float32)

    with InferenceServerClient(address) as client:
        print("server:", client.get_server_metadata()["name"], "ready:", client.is_server_ready())

        # the folder digits of a model root; what does not fit is a 507 that says how much is free
        client.load_model("digits")
        print("inputs:", [found["name"] for found in client.get_model_metadata("digits")["inputs"]])

        tensor = InferInput("IMAGE", images.shape, "FP32")
        tensor.set_data_from_numpy(images)
        outputs = [InferRequestedOutput("LABEL")]
        result = client.infer("digits", [tensor], outputs=outputs, request_id="1")
        print("labels:", result.as_numpy("LABEL").tolist(), "truth:", sample["labels"])

        client.unload_model("digits")
        try:
            client.infer("digits", [tensor])
        except InferenceServerException as error:
            print("unloaded:", error.status(), error.message())


if __name__ == "__main__":
    main(*sys.argv[1:])
