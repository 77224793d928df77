import numpy as np
import triton_python_backend_utils as pb_utils

GOOD = {b"good", b"great", b"fine", b"fast"}
BAD = {b"bad", b"poor", b"broken", b"slow"}


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        words = pb_utils.get_input_tensor_by_name(request, "WORDS").as_numpy()
        score = sum((word in GOOD) - (word in BAD) for word in words)
        mood = b"good" if score > 0 else b"bad" if score < 0 else b"neutral"
        return pb_utils.InferenceResponse([pb_utils.Tensor("MOOD", np.array([mood], np.object_))])
