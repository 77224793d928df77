import json

import triton_python_backend_utils as pb_utils
from device import allocate, parameter_bytes


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.memory = allocate(
            parameter_bytes(config, "allocate_bytes"), parameter_bytes(config, "device_bytes")
        )

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]

    def finalize(self):
        self.memory.close()
