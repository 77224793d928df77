from pathlib import Path

import triton_python_backend_utils as pb_utils

try:
    import onnxruntime
except ImportError:
    onnxruntime = None


class TritonPythonModel:
    def initialize(self, args):
        if onnxruntime is None:
            raise pb_utils.TritonModelException(
                "digits needs onnxruntime in the Python that Triton runs models with:"
                " pip install onnxruntime 'numpy<2'"
            )
        onnxruntime.disable_telemetry_events()  # on unless said: an example calls nobody
        options = onnxruntime.SessionOptions()
        # The network is tiny: more threads cost more than they give, most of all on small machines.
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            Path(__file__).with_name("model.onnx"), options, providers=["CPUExecutionProvider"]
        )

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        label, probabilities = self.session.run(["label", "probabilities"], {"IMAGE": image})
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("LABEL", label),
                pb_utils.Tensor("PROBABILITIES", probabilities),
            ]
        )
