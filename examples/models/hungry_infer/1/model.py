import json

import numpy as np
import triton_python_backend_utils as pb_utils
from device import MIB, allocate, parameter_bytes


class TritonPythonModel:
    def initialize(self, args):
        self.limit = parameter_bytes(json.loads(args["model_config"]), "device_bytes")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        mib = int(pb_utils.get_input_tensor_by_name(request, "MIB").as_numpy()[0])
        if mib < 1:
            return refusal(f"MIB is {mib}; it must be at least 1")
        # The MemoryError leaves execute() as a framework's would: Triton makes the answer of it.
        with allocate(mib * MIB, self.limit) as memory:
            allocated = np.array([len(memory) // MIB], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("ALLOCATED", allocated)])


def refusal(message):
    error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(error=error)
