import re

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0]
        words = np.array(re.findall(rb"\w+", text.lower()), np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("WORDS", words)])
