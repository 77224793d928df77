"""A model.py that serves the model.joblib beside it, by scikit-learn in Triton's Python.

X has a row for each sample, and Y a number for each row. Loading such a file runs code.
"""

from pathlib import Path

import joblib
import numpy as np
import triton_python_backend_utils as pb_utils

FILE = Path(__file__).with_name("model.joblib")


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        columns = joblib.load(FILE).n_features_in_
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1, columns]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        self.model = joblib.load(FILE)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        found = np.asarray(self.model.predict(rows), np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", found)])
