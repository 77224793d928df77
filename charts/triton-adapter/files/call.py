"""Loads a model that comes with the call, invokes it, unloads it. One connection, so one pod."""

import base64
import http.client
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", v)]) for v in values]
"""
CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
    "instance_group": [{"kind": "KIND_CPU", "count": 1}],
}
NAME, VALUES = "helm-test", [1.0, 2.5]


def main(url, token_file=None):
    token = Path(token_file).read_text().strip() if token_file else ""
    control = {"Authorization": f"Bearer {token}"} if token else {}
    door = http.client.HTTPConnection(urlsplit(url).netloc, timeout=400)

    def call(method, path, body=None, headers=None):
        door.request(method, path, None if body is None else json.dumps(body), headers or {})
        answer = door.getresponse()
        text = answer.read().decode()
        print(f"{method} {path}: {answer.status} {text.strip()}", flush=True)
        if answer.status != http.HTTPStatus.OK:
            sys.exit(f"{method} {path} was answered with {answer.status}")
        return json.loads(text) if text else None

    parameters = {
        "config": json.dumps(CONFIG),
        "file:1/model.py": base64.b64encode(MODEL.encode()).decode(),
    }
    call("POST", f"/v2/repository/models/{NAME}/load", {"parameters": parameters}, control)
    tensor = {"name": "IN", "datatype": "FP32", "shape": [len(VALUES)], "data": VALUES}
    # an endpoint with keys wants the token of those who go round it
    answer = call("POST", f"/models/{NAME}/invoke", {"inputs": [tensor]}, control)
    call("DELETE", f"/models/{NAME}", headers=control)
    if answer["outputs"][0]["data"] != VALUES:
        sys.exit(f"{answer['outputs']} is not what went in")


main(*sys.argv[1:])
