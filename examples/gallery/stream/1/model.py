import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for word in words_of(request):
                tensor = pb_utils.Tensor("WORD", np.array([word], np.object_))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def words_of(request):
    """Your generator goes here: yield each part as soon as it is known."""
    text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0]
    yield from text.split()
