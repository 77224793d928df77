"""Models that take texts: embedders by a hash, a classifier, and those that complete a text."""

import hashlib
import struct
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

WIDTH = 8
EMBEDDER = """\
backend: "python"
max_batch_size: {batch}
input [{{ name: "TEXT" data_type: TYPE_STRING dims: [{dims}] }}]
output [{{ name: "VECTOR" data_type: TYPE_FP32 dims: [{width}] }}]
"""

_MODEL = """\
import hashlib
import os
import struct
import time

import numpy as np
import triton_python_backend_utils as pb_utils

SALT = {salt!r}
WIDTH = {width}
{vector}


class TritonPythonModel:
    def initialize(self, args):
        self.is_batched = {batch} > 0

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
        if b"raise" in texts:
            raise ValueError("no such text")
        if b"no output" in texts:
            return pb_utils.InferenceResponse([])
        if texts[0].startswith(b"wait for "):
            gate = texts[0].decode().removeprefix("wait for ")
            while not os.path.exists(gate):
                time.sleep(0.01)
        rows = np.array([vector(SALT, text, WIDTH) for text in texts], np.float32)
        if b"no numbers" in texts:
            rows = rows[:, :0]
        values = rows if self.is_batched else rows[0]
        return pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", values)])
"""

_VECTOR = """
def vector(salt, text, width):
    seed = hashlib.sha256(salt.encode() + text).digest()
    values = [(seed[at % 32] * 251 + at) % 1000 / 1000 - 0.5 for at in range(width)]
    return values
"""


def vector_of(salt: str, text: str, width: int = WIDTH) -> list[float]:
    """The vector of a text by the model of that salt, as FP32 has it."""
    seed = hashlib.sha256((salt + text).encode()).digest()
    values = [(seed[at % 32] * 251 + at) % 1000 / 1000 - 0.5 for at in range(width)]
    return list(struct.unpack(f"<{width}f", struct.pack(f"<{width}f", *values)))


def read_vector(given: str | list[float]) -> list[float]:
    """The numbers of a vector, also of one in base64."""
    if isinstance(given, list):
        return given
    raw = b64decode(given)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def write_embedder(
    folder: Path,
    *,
    salt: str,
    batch: int = 8,
    width: int = WIDTH,
    dims: int = 1,
    config: str = EMBEDDER,
    more: str = "",  # of the config
) -> Path:
    (folder / "1").mkdir(parents=True)
    text = config.format(batch=batch, dims=dims, width=width)
    (folder / "config.pbtxt").write_text(text + more)
    model = _MODEL.format(salt=salt, width=width, batch=batch, vector=_VECTOR)
    (folder / "1" / "model.py").write_text(model)
    return folder


def write_classifier(folder: Path, *, labels: Sequence[str] = (), batch: int = 8) -> Path:
    """The class of a text is its number of words, of three."""
    write_embedder(folder, salt=folder.name, batch=batch, width=3)
    config = folder / "config.pbtxt"
    if labels:
        named = 'label_filename: "labels.txt" dims: [3] }]'
        config.write_text(config.read_text().replace("dims: [3] }]", named))
        (folder / "labels.txt").write_text("".join(f"{label}\n" for label in labels))
    model = folder / "1" / "model.py"
    by_words = """
def vector(salt, text, width):
    return [0.5 if at == len(text.split()) % width else 0.25 for at in range(width)]
"""
    model.write_text(model.read_text().replace(_VECTOR, by_words))
    return folder


_COMPLETER = """\
backend: "python"
max_batch_size: 0
input [
  {{ name: "{prompt}" data_type: TYPE_STRING dims: [1] }},
  {{ name: "max_tokens" data_type: TYPE_INT32 dims: [1] optional: true }}
]
output [{{ name: "{text}" data_type: TYPE_STRING dims: [1] }}]
model_transaction_policy {{ decoupled: true }}
"""

_WORDS = """\
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, {prompt!r}).as_numpy()[0].decode()
            most = pb_utils.get_input_tensor_by_name(request, "max_tokens")
            words = prompt.split()[: None if most is None else int(most.as_numpy()[0])]
            sender = request.get_response_sender()
            for word in words:
                if word == "bytes":
                    sender.send(
                        pb_utils.InferenceResponse(
                            [pb_utils.Tensor({text!r}, np.array([b"caf\\xe9 "], np.object_))]
                        )
                    )
                    continue
                if word.startswith("wait:"):
                    open(word.removeprefix("wait:"), "w").close()
                    time.sleep(600)
                if word == "fail":
                    error = pb_utils.TritonError("no such word")
                    sender.send(pb_utils.InferenceResponse([], error=error))
                    break
                times = 2**20 if word == "long" else 1
                text = (word.upper() + " ") * times
                tensor = pb_utils.Tensor({text!r}, np.array([text], np.object_))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_completer(folder: Path, *, prompt: str = "text_input", text: str = "text_output") -> Path:
    """It answers with the words of the prompt in capitals, one by one, and fails at `fail`. For
    `bytes` it answers with a text of Latin-1, and for `long` with 5 MiB. For `wait:PATH`
    it creates that file, and waits.
    """
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_COMPLETER.format(prompt=prompt, text=text))
    (folder / "1" / "model.py").write_text(_WORDS.format(prompt=prompt, text=text))
    return folder
