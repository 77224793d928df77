import pickle
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        # written by train.py beside this file; a pickle runs code, so load only your own
        self.model = pickle.loads(Path(__file__).with_name("model.pkl").read_bytes())  # noqa: S301

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        measures = pb_utils.get_input_tensor_by_name(request, "MEASURES").as_numpy()
        names = np.array([name.encode() for name in self.model.predict(measures)], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("NAME", names)])
