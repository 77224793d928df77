"""Labelled failure texts, and models that fail with them as the real thing would."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[2] / "data"
FILES = ("triton_failure_texts.jsonl", "more_failure_texts.jsonl")

# Triton's own words around a failure: they come with a real one by themselves
_LOADED = re.compile(
    r"load failed for model '[^']*': version \d+ is at UNAVAILABLE state: Internal: (.*?);\n\Z",
    re.DOTALL,
)
_EXECUTED = re.compile(
    r"Failed to process the request\(s\) for model '[^']*', message: ", re.DOTALL
)
_TRACE = re.compile(r"\n\nAt:\n.*\Z", re.DOTALL)
_KIND = re.compile(r"([^\n:'\"]{1,60}): ")

# with a size, so that several are loaded at a time
_CONFIG = """\
backend: "python"
max_batch_size: 0
input [{ name: "TEXT" data_type: TYPE_STRING dims: [-1] }]
output [{ name: "TEXT" data_type: TYPE_STRING dims: [-1] }]
parameters { key: "memory_bytes" value { string_value: "1KiB" } }
"""

_COMMON = """\
import os, pathlib, signal
import triton_python_backend_utils as pb_utils


def failure(kind, text):
    # the name of the class is what stands before the colon, whatever it is
    return type(kind, (Exception,), {})(text)

"""

_FAILS_TO_LOAD = """
class TritonPythonModel:
    def initialize(self, args):
        kind, _, text = pathlib.Path(__file__).with_name("text").read_text().partition("\\n")
        raise failure(kind, text)

    def execute(self, requests):
        raise AssertionError
"""

_FAILS_TO_ANSWER = """
CODES = {
    "400": "INVALID_ARG",
    "404": "NOT_FOUND",
    "500": "INTERNAL",
    "501": "UNSUPPORTED",
    "503": "UNAVAILABLE",
}


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "TEXT")
        how, text = (each.decode() for each in given.as_numpy())
        if how == "answer":
            return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", given.as_numpy())])
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how not in CODES:
            raise failure(how, text)
        code = getattr(pb_utils.TritonError, CODES[how])  # there once the model is made
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))
"""


@dataclass(frozen=True)
class Label:
    """`text` as Triton gives it, `status` of Triton's HTTP port with it."""

    text: str
    phase: str
    status: int
    is_oom: bool

    @property
    def inner(self) -> str:
        """Without the words of Triton that a python model cannot leave out."""
        if found := _LOADED.match(self.text):
            return _TRACE.sub("", found[1])
        if found := _EXECUTED.match(self.text):
            return _TRACE.sub("", self.text[found.end() :])
        return self.text

    @property
    def has_envelope(self) -> bool:
        return self.inner != self.text

    @property
    def raised(self) -> tuple[str, str]:
        """Class and text of the exception that prints as `inner`."""
        if found := _KIND.match(self.inner):
            return found[1], self.inner[found.end() :]
        return "RuntimeError", self.inner


def labels(phase: str) -> Iterator[Label]:
    """Those that the words alone decide."""
    for file in FILES:
        for line in (DATA / file).read_text().splitlines():
            row = json.loads(line)
            if row["phase"] == phase and not row.get("ambiguous"):
                status = row.get("http_status", 400 if phase == "load" else 500)
                yield Label(row["text"], phase, status, row["is_oom"])


def write_failing_load(folder: Path, kind: str, text: str) -> Path:
    """A model whose initialize raises an exception of this class with this text."""
    _write(folder, _FAILS_TO_LOAD)
    (folder / "1" / "text").write_text(f"{kind}\n{text}")
    return folder


def write_failing_answers(folder: Path) -> Path:
    """A model that fails as each request says; failing() makes such a request."""
    return _write(folder, _FAILS_TO_ANSWER)


def failing(how: str | int, text: str) -> dict[str, object]:
    """`how` is a class to raise, a status to answer with, `die` (SIGKILL), or `answer`."""
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [2], "data": [str(how), text]}
    return {"inputs": [tensor]}


def _write(folder: Path, body: str) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_CONFIG)
    (folder / "1" / "model.py").write_text(_COMMON + body)
    return folder
