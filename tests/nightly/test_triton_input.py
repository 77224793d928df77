"""Sends a real Triton odd headers, parameters and bodies, as callers may who only infer. None of
them ends it.
"""

import http.client
import json
import random
import resource
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.processes import descendants, tritonserver
from tests.running import RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_ADDRESS_BYTES = 9 * 2**30  # of each process: a request must not take the machine
_MOST_ENDS = 12
_ANSWER_SECONDS = 20

_NUMBERS = (
    *("0", "-0", "1", "-1", "2", "3", "1000", "2147483647", "2147483648", "-2147483649"),
    *("4294967295", "4294967296", "9223372036854775807", "9223372036854775808", "1e999"),
    *("18446744073709551615", "18446744073709551616", "1e-999", "1e308", "nan", "inf", "0x10"),
    *("", " ", "+5", "1 2", "1,2", "9" * 40, "9" * 400, "-", "five", "1.5", "\t7", "007"),
)
_CODINGS = (
    *("gzip", "deflate", "identity", "*", "br", "gzip, deflate", "gzip;q=0", "GZIP", "gzip;q"),
    *("gzip;;q=1", ";q=1", ",,,", "gzip;q=1;q=1e999", "deflate;q= 1e400", "*;q=1e999", "q=1e999"),
    *(f"gzip;q={number}" for number in _NUMBERS),
    *("gzip," * 300, "identity;q=1e999, gzip", "\x7f", "gzip;q=0.0000000000000000000000000001"),
)
_TEXTS = ("", "x" * 8000, "\xff\xfe", "%00", "a,b;c", '"', "{}", "../..", "a\tb")
_HEADERS = {
    "Accept-Encoding": _CODINGS,
    "Content-Encoding": ("gzip", "deflate", "identity", "br", "", "gzip, gzip", "GZIP"),
    "Inference-Header-Content-Length": _NUMBERS,
    "Content-Type": ("application/json", "application/x-www-form-urlencoded", "text/plain", "a"),
    "traceparent": (*_TEXTS, "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-zz-1-1", "99-" * 50),
    "tracestate": (*_TEXTS, "a=b," * 200, "="),
    "X-Request-Id": _TEXTS,
    "X-Amzn-SageMaker-Custom-Attributes": _TEXTS,
    "Accept": ("*/*", "text/event-stream", "application/octet-stream", "q=1e999"),
    "Expect": ("100-continue", "200-ok"),
    "TE": ("trailers", "gzip;q=1e999"),
    "Range": ("bytes=0-1e999", "bytes=-1"),
    "triton_grpc_error": ("true", "1"),
    "timeout": _NUMBERS,
    "priority": _NUMBERS,
    "Upgrade": ("h2c", "websocket"),
    "Keep-Alive": ("timeout=1e999", "max=-1"),
    "Authorization": ("Bearer x", "Basic " + "A" * 500),
    "Content-Range": ("bytes 0-1/2",),
    "Cookie": _TEXTS,
    "endpoint-load-metrics-format": ("text", "json", "bin", "x" * 100),
}
_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 1000, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**63),
    *(2**64 - 1, 2**64, 10**30, 1.5, -1.5, 1e308, True, False, None, "", "1", "x", "x" * 5000),
    *([], [1], {}, {"a": 1}, [[]], "\0", "\ud83d\ude00", "é"),
)
_REQUEST_KEYS = (
    *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"),
    *("own", "", "\0", "triton_enable_empty_final_response", "headers", "classification", "id"),
    *("triton_x", "ping", "max_tokens"),
)
_INPUT_KEYS = (
    *("binary_data_size", "shared_memory_region", "shared_memory_byte_size", "own", ""),
    *("shared_memory_offset", "classification", "binary_data"),
)
_OUTPUT_KEYS = (
    *("classification", "binary_data", "shared_memory_region", "shared_memory_byte_size", "own"),
    *("shared_memory_offset", "binary_data_size", "classification\0", "\0"),
)
_NAMES = ("OUT", "OUT2", "IN", "", "\0", "OUT\0", "x" * 3000, "é", "../OUT", "OUT ")
_TYPES = {"FP32": "FP32", "STRING": "BYTES", "FP16": "FP16", "BOOL": "BOOL", "INT64": "INT64"}


def config(kind: str, dims: str, more: str = "", batch: int = 0, output: str = "") -> str:
    return (
        f'backend: "python"\nmax_batch_size: {batch}\n'
        f'input [{{ name: "IN" data_type: TYPE_{kind} dims: {dims} }}]\n'
        f'output [{{ name: "OUT" data_type: TYPE_{kind} dims: {dims} {output} }}]\n{more}\n'
    )


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_STRING dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_STRING dims: [-1] }]
ensemble_scheduling { step [{ model_name: "step" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }] }
"""
_PRIORITIES = (
    "dynamic_batching { max_queue_delay_microseconds: 100 priority_levels: 3"
    " default_priority_level: 2 default_queue_policy { allow_timeout_override: true"
    " default_timeout_microseconds: 1000000 max_queue_size: 8 } }"
)
_SEQUENCES = (
    "sequence_batching { max_sequence_idle_microseconds: 100000 oldest"
    " { max_candidate_sequences: 4 } control_input [{ name: 'START' control"
    " [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }] }] }"
)
MODELS = {
    "varying": ("FP32", config("FP32", "[-1]")),
    "labelled": ("FP32", config("FP32", "[3]", output='label_filename: "labels.txt"')),
    "text": ("STRING", config("STRING", "[-1]")),
    "half": ("FP16", config("FP16", "[3]")),
    "flags": ("BOOL", config("BOOL", "[3]")),
    "batched": ("FP32", config("FP32", "[3]", batch=4)),
    "prioritised": ("INT64", config("INT64", "[3]", _PRIORITIES, batch=4)),
    "sequences": ("FP32", config("FP32", "[3]", _SEQUENCES, batch=4)),
}
CHAIN = "chain"
NAMES = (*MODELS, CHAIN)


@dataclass
class Fuzz:
    adapter: RunningAdapter
    chance: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    ends: list[str] = field(default_factory=list)
    latest: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    channels: list[grpc.Channel] = field(default_factory=list)

    def play(self, seconds: float) -> None:
        pid, end = tritonserver(self.adapter), time.monotonic() + seconds
        while time.monotonic() < end and len(self.ends) < _MOST_ENDS:
            act = self.chance.choice((self.send_http, self.send_http, self.send_raw, self.send_rpc))
            act()
            if is_running(pid):
                continue
            self.ends.append(" / ".join(self.latest))
            pid = self.wait_for_restart(pid)

    def wait_for_restart(self, pid: int) -> int:
        wait_until(lambda: self.is_back(pid), 60, "Triton is back with all models")
        limit_memory(self.adapter)
        return tritonserver(self.adapter)

    def is_back(self, pid: int) -> bool:
        with (
            suppress(OSError, ValueError, http.client.HTTPException),
            closing(self.adapter.client()) as client,
        ):
            return tritonserver(self.adapter) != pid and all(
                client.get(f"/v2/models/{name}/ready").status == 200 for name in NAMES
            )
        return False

    # -- requests ---------------------------------------------------------------------------

    def tensor(self, kind: str, values: int) -> list[Any]:
        one: dict[str, Any] = {"STRING": "a", "BOOL": True, "INT64": 7}
        return [one.get(kind, 1.5)] * values

    def shape(self, name: str) -> tuple[list[int], int]:
        count = self.chance.choice((0, 1, 3, 3, 3)) if name in {"varying", "text"} else 3
        if name in {"batched", "prioritised", "sequences"}:
            batch = self.chance.choice((0, 1, 1, 2, 4, 5))
            return [batch, count], batch * count
        return [count], count

    def some(self, keys: tuple[str, ...], values: tuple[Any, ...] = _VALUES) -> dict[str, Any]:
        count = self.chance.choice((0, 0, 1, 1, 2, 3))
        return {self.chance.choice(keys): self.chance.choice(values) for _ in range(count)}

    def outputs(self) -> list[Any]:
        chance, found = self.chance, []
        for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 30))):
            parameters = self.some(_OUTPUT_KEYS)
            if chance.random() < 0.5:
                parameters["classification"] = chance.choice((1, 2, *_VALUES))
            name = "OUT" if chance.random() < 0.7 else chance.choice(_NAMES)
            found.append({"name": name, "parameters": parameters})
        return found

    def body(self, name: str, kind: str) -> dict[str, Any]:
        shape, count = self.shape(name)
        chance = self.chance
        if chance.random() < 0.15:
            shape = chance.choice(
                ([-1], [], [2**63 - 1], [0, 2**40], [2**32, 2**32, 0], ["3"], [1.5])
            )
        tensor = {
            "name": "IN",
            "datatype": _TYPES[kind]
            if chance.random() < 0.9
            else chance.choice((*_TYPES.values(), "", "X")),
            "shape": shape,
            "data": self.tensor(kind, count),
        }
        if parameters := self.some(_INPUT_KEYS):
            tensor["parameters"] = parameters
        body: dict[str, Any] = {"inputs": [tensor] * chance.choice((1, 1, 1, 1, 2))}
        if parameters := self.some(_REQUEST_KEYS):
            body["parameters"] = parameters
        if chance.random() < 0.7:
            body["outputs"] = self.outputs()
        if chance.random() < 0.1:
            body["id"] = chance.choice(_VALUES)
        return body

    def broken(self, text: str) -> bytes:
        """Return the JSON, at times spelled oddly or cut."""
        chance = self.chance
        match chance.randrange(8):
            case 0:
                at = chance.randrange(len(text))
                return (text[:at] + chance.choice('\0"{}[],:9\\\x1f') + text[at:]).encode()
            case 1:
                return text[: chance.randrange(len(text))].encode()
            case 2:
                return text.replace("classification", "\\u0063lassification").encode()
            case 3:
                return text.replace('"outputs":', '"outputs": [], "outputs":').encode()
            case 4:
                return text.replace('"name": "OUT"', '"name": "OUT", "name": "x"').encode()
            case _:
                return text.encode()

    def send_http(self) -> None:
        chance = self.chance
        name, (kind, _) = chance.choice([*MODELS.items(), (CHAIN, ("STRING", ""))])
        headers = {
            key: chance.choice(_HEADERS[key])
            for key in chance.sample([*_HEADERS], chance.choice((0, 0, 1, 1, 2, 3)))
        }
        path = chance.choice(
            (
                *(f"/v2/models/{name}/infer", f"/v2/models/{name}/infer", f"/models/{name}/invoke"),
                *(f"/v2/models/{name}/generate", f"/v2/models/{name}/generate_stream"),
                *(f"/v2/models/{name}/versions/1/infer", f"/v2/models/{name}/infer?a=%00"),
            )
        )
        body = self.body(name, kind)
        if "generate" in path:
            body = {"IN": self.tensor(kind, 3), **self.some(_REQUEST_KEYS)}
        raw = self.broken(json.dumps(body))
        if chance.random() < 0.2:  # raw tensors behind JSON
            tensor = body.get("inputs", [{}])[0]
            tensor.pop("data", None)
            size = chance.choice((12, 12, *_VALUES))
            tensor["parameters"] = {"binary_data_size": size}
            part = json.dumps(body).encode()
            headers["Inference-Header-Content-Length"] = chance.choice((str(len(part)), *_NUMBERS))
            raw = part + bytes(12)
        self.ask(chance.choice(("http", "http-data")), path, headers, raw)

    def send_raw(self) -> None:
        """Send a sound inference, with one header or with one parameter alone that is odd."""
        chance = self.chance
        name, (kind, _) = chance.choice([*MODELS.items()])
        shape = [1, 3] if name in {"batched", "prioritised", "sequences"} else [3]
        tensor: dict[str, Any] = {
            "name": "IN",
            "datatype": _TYPES[kind],
            "shape": shape,
            "data": self.tensor(kind, 3),
        }
        body: dict[str, Any] = {"inputs": [tensor]}
        headers: dict[str, str] = {}
        match chance.randrange(4):
            case 0:
                key = chance.choice([*_HEADERS])
                headers[key] = chance.choice(_HEADERS[key])
            case 1:
                body["parameters"] = {chance.choice(_REQUEST_KEYS): chance.choice(_VALUES)}
                if name == "sequences":
                    body["parameters"] |= {"sequence_id": chance.choice((1, 2, "a", *_VALUES))}
            case 2:
                parameters = {chance.choice(_OUTPUT_KEYS): chance.choice(_VALUES)}
                body["outputs"] = [{"name": "OUT", "parameters": parameters}]
            case _:
                tensor["parameters"] = {chance.choice(_INPUT_KEYS): chance.choice(_VALUES)}
        self.ask("http-data", f"/v2/models/{name}/infer", headers, json.dumps(body).encode())

    def ask(self, listener: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.latest.append(f"{listener} {path} {headers} {body[:600]!r}")
        host, _, port = self.adapter.listeners[listener.replace("-", "_")].rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=_ANSWER_SECONDS)
        try:
            connection.putrequest("POST", path, skip_accept_encoding=True)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                connection.putheader(key, value.encode("latin-1"))
            connection.endheaders(body)
            answer = connection.getresponse()
            answer.read()
            self.seen[f"http {answer.status}"] += 1
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.seen[f"http {type(error).__name__}"] += 1
        finally:
            connection.close()

    def send_rpc(self) -> None:
        chance = self.chance
        name, (kind, _) = chance.choice([*MODELS.items(), (CHAIN, ("STRING", ""))])
        shape, count = self.shape(name)
        raw = {"STRING": b"\1\0\0\0a", "BOOL": b"\1", "FP16": b"\0\0", "INT64": bytes(8)}
        request = pb.ModelInferRequest(model_name=name)
        if chance.random() < 0.1:
            shape = chance.choice(([-1], [], [2**63 - 1], [0, 2**40], [2**32, 2**32, 0]))
        tensor = request.inputs.add(name="IN", datatype=_TYPES[kind], shape=shape)
        if chance.random() < 0.9:
            request.raw_input_contents.append(raw.get(kind, struct.pack("<f", 1.5)) * count)
        else:
            tensor.contents.fp32_contents.extend([1.5] * count)
        self.put(tensor.parameters, _INPUT_KEYS)
        self.put(request.parameters, _REQUEST_KEYS)
        for _ in range(chance.choice((0, 1, 1, 2, 30))):
            wanted = "OUT" if chance.random() < 0.7 else chance.choice(_NAMES)
            output = request.outputs.add(name=wanted)
            self.put(output.parameters, _OUTPUT_KEYS)
            if chance.random() < 0.5:
                output.parameters["classification"].int64_param = chance.choice(
                    (0, 1, 2, -1, 2**63 - 1)
                )
        metadata = self.metadata()
        self.latest.append(f"grpc {metadata} {str(request)[:900]!r}")
        try:
            self.call(request, metadata)
            self.seen["grpc OK"] += 1
        except grpc.RpcError as error:
            self.seen[f"grpc {error.code().name}"] += 1
        except (ValueError, TypeError) as error:
            self.seen[f"grpc {type(error).__name__}"] += 1

    def metadata(self) -> list[tuple[str, str]]:
        found = []
        for key in self.chance.sample([*_HEADERS], self.chance.choice((0, 0, 1, 2))):
            value = self.chance.choice(_HEADERS[key])
            if value.isascii() and value.isprintable() and key not in {"TE", "Content-Type"}:
                found.append((key.lower(), value))
        if self.chance.random() < 0.1:
            found.append(("grpc-accept-encoding", self.chance.choice(_CODINGS[:20])))
        return found

    def put(self, into: Any, keys: tuple[str, ...]) -> None:
        for key, value in self.some(keys).items():
            with suppress(ValueError, TypeError):
                match value:
                    case bool():
                        into[key].bool_param = value
                    case int() if self.chance.random() < 0.3:
                        into[key].uint64_param = value
                    case int():
                        into[key].int64_param = value
                    case float():
                        into[key].double_param = value
                    case str():
                        into[key].string_param = value
                    case _:
                        into[key].SetInParent()

    def call(self, request: pb.ModelInferRequest, metadata: list[tuple[str, str]]) -> None:
        channel = self.chance.choice(self.channels)
        service = "/inference.GRPCInferenceService"
        if self.chance.random() < 0.3:
            stream = channel.stream_stream(
                f"{service}/ModelStreamInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelStreamInferResponse.FromString,
            )
            for _ in stream(iter([request]), timeout=_ANSWER_SECONDS, metadata=metadata):
                pass
            return
        unary = channel.unary_unary(
            f"{service}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        unary(request, timeout=_ANSWER_SECONDS, metadata=metadata)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def limit_memory(adapter: RunningAdapter) -> None:
    for pid in [adapter.process.pid, *descendants(adapter.process.pid)]:
        with suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[RunningAdapter]:
    flags = ("--http-data=127.0.0.1:0", "--grpc-data=127.0.0.1:0", f"--model-roots={tmp_path}")
    with embedded_adapter(*flags) as adapter:
        limit_memory(adapter)
        yield adapter


def test_no_request_for_inference_ends_triton(adapter, tmp_path, seconds, seed):
    for name, (_, text) in MODELS.items():
        folder = write_python_model(tmp_path / name, config=text)
        (folder / "labels.txt").write_text("zero\none\ntwo\n")
    write_python_model(tmp_path / CHAIN / "step", config=MODELS["text"][1])
    (tmp_path / CHAIN / CHAIN / "1").mkdir(parents=True)
    (tmp_path / CHAIN / CHAIN / "config.pbtxt").write_text(ENSEMBLE)
    with closing(adapter.client()) as client:
        for name in NAMES:
            reply = client.load(name, tmp_path / name)
            assert reply.status == 200, (name, reply)
    fuzz = Fuzz(adapter, random.Random(seed))
    for listener in ("grpc", "grpc_data"):
        fuzz.channels.append(grpc.insecure_channel(adapter.listeners[listener]))
    fuzz.play(seconds)
    for channel in fuzz.channels:
        channel.close()
    sys.stdout.write(f"{sum(fuzz.seen.values())} requests: {dict(fuzz.seen)}\n")
    assert not fuzz.ends, "\n".join(fuzz.ends)
    assert fuzz.seen["http 200"]
    assert fuzz.seen["grpc OK"]
