import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
        summary = np.array([summary_of(text).encode()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SUMMARY", summary)])


def summary_of(text):
    """Your model goes here."""
    words = text.split()
    return f"{len(words)} words, the longest is {max(words, key=len, default='')}"
