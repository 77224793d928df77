"""The same call put to the adapter and to Triton is answered with the same code; where it is not,
docs/v2.md has a row that says so.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from adapter.relay import frames
from tests.cases import rows
from tests.frontends.grpc.proxy_listener import INFER, Wire, frame, head_of, prefixed, wire_to
from tests.grpc_calls import (
    NO_LIMITS,
    Calls,
    calls_to,
    infer_request,
    pb,
    write_decoupled_model,
)
from tests.processes import triton_client
from tests.running import COMPLETE, Client, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

PASSTHROUGH = [f"--passthrough={item}" for item in ("shared_memory", "trace", "log")]
PAGE = Path(__file__).parents[3] / "docs" / "v2.md"


@dataclass
class Sides:
    """The adapter and the Triton behind it, by REST and by gRPC; where the models are."""

    root: Path
    repository: Path
    rest: tuple[Client, Client]
    grpc: tuple[Calls, Calls]
    grpc_addresses: tuple[str, str]


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> Iterator[Sides]:
    root = tmp_path_factory.mktemp("models")
    package = write_python_model(root / "m")
    region = SharedMemory(create=True, size=64)
    with ExitStack() as stack:
        stack.callback(region.unlink)
        stack.callback(region.close)
        flags = (f"--model-roots={root}", *PASSTHROUGH, COMPLETE)
        adapter = stack.enter_context(embedded_adapter(*flags))
        ours = stack.enter_context(adapter.client())
        theirs = stack.enter_context(triton_client(adapter))
        ours.load_model("m", package)
        found = {"key": f"/{region.name}", "offset": 0, "byte_size": 64}
        assert theirs.post("/v2/systemsharedmemory/region/r/register", found).status == 200
        addresses = (adapter.grpc, adapter.grpc_address)
        calls = [stack.enter_context(calls_to(address, NO_LIMITS)) for address in addresses]
        yield Sides(root, adapter.repository, (ours, theirs), (calls[0], calls[1]), addresses)


@dataclass(frozen=True)
class Rest:
    """`row`: the first cell of the row of the page, where `ours` is not what `theirs` is."""

    method: str
    path: str
    theirs: int
    ours: int = 0
    row: str = ""
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.path} {str(self.body)[:30]}"


def in_region(name: str, offset: int = 0) -> dict[str, Any]:
    where = {"shared_memory_region": name, "shared_memory_byte_size": 4}
    where["shared_memory_offset"] = offset
    return {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "parameters": where}]}


def out_region(name: str) -> dict[str, Any]:
    where = {"shared_memory_region": name, "shared_memory_byte_size": 4}
    return {**infer_body(1.0), "outputs": [{"name": "OUT", "parameters": where}]}


M, NONE, BAD = "/v2/models/m", "/v2/models/none", b"{nope"
SHM = "/v2/systemsharedmemory"
NO_REGION = "inference with a region of shared memory that is not registered"
NO_VERSION = "a version that the model does not have"
BAD_JSON = "JSON that cannot be read, or has the wrong type"
BAD_UNLOAD = "the same at unload"
UNKNOWN = "`/ready`, `/stats` and `/trace/setting` of an unknown model"
NO_FOLDER = "load of a model of which no model root has a folder"
UNPACKED = "a body that does not unpack as its `Content-Encoding` says, to its very end"
CODING = "`Content-Encoding` of another coding than gzip and deflate"
NO_PATH = "a path that is not there"
SLASH = "a path with a slash at its end"
FOREIGN = "an `Origin` of elsewhere, or a `Host` of elsewhere where the listener is on loopback"
TRANSFER = "`Transfer-Encoding` of another coding than `chunked`, such as `gzip, chunked`"
CAPITALS = "`Content-Encoding: GZIP`, in capitals"
UNSUPPORTED = "UNSUPPORTED of the model's own, inference of a decoupled model"
PACKED = gzip.compress(json.dumps(infer_body(1.0)).encode(), mtime=0)
LAST = {"Connection": "close"}
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PACKED), PACKED)
PLAIN = json.dumps(infer_body(1.0)).encode()
PLAIN_CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PLAIN), PLAIN)
BOTH_LENGTHS = "`Content-Length` beside `Transfer-Encoding`"
SIBLINGS = "load of an ensemble whose steps are other folders of the repository"

RESTS = [
    *(Rest("GET", f"/v2{path}", 200) for path in ("", "/health/live", "/health/ready")),
    *(
        Rest("HEAD", f"/v2{path}", 405, 200, "`HEAD`")
        for path in ("", "/health/live", "/health/ready")
    ),
    *(Rest("GET", M + path, 200) for path in ("", "/ready", "/config", "/stats", "/trace/setting")),
    *(Rest("GET", NONE + path, 404) for path in ("", "/config")),
    *(Rest("GET", NONE + path, 400, 404, UNKNOWN) for path in ("/ready", "/stats")),
    Rest("GET", f"{NONE}/trace/setting", 400, 404, UNKNOWN),
    *(Rest("GET", f"{M}/versions/9{path}", 404, 400, NO_VERSION) for path in ("", "/config")),
    *(Rest("GET", f"{M}/versions/9{path}", 400) for path in ("/ready", "/stats")),
    Rest("POST", f"{M}/versions/9/infer", 404, 400, NO_VERSION, infer_body(1.0)),
    Rest("POST", f"{M}/infer", 200, body=infer_body(1.0)),
    Rest("POST", f"{M}/infer", 200, body=in_region("r")),
    Rest("POST", f"{M}/infer", 404, 400, NO_REGION, in_region("none")),
    Rest("POST", f"{M}/infer", 404, 400, NO_REGION, out_region("none")),
    Rest("POST", f"{M}/infer", 400, body=in_region("r", offset=1000)),
    Rest("POST", f"{M}/infer", 400, body={"inputs": []}),
    Rest("POST", f"{M}/infer", 400, body={**infer_body(1.0), "outputs": [{"name": "none"}]}),
    Rest("POST", f"{M}/infer", 500, 400, BAD_JSON, BAD),
    Rest("POST", f"{M}/infer", 501, 400, CODING, infer_body(1.0), {"Content-Encoding": "br"}),
    Rest("POST", f"{M}/infer", 200, 400, UNPACKED, b"plain", {"Content-Encoding": "gzip"}),
    Rest("POST", f"{NONE}/infer", 404, body=infer_body(1.0)),
    Rest("GET", f"{SHM}/status", 200),
    Rest("GET", f"{SHM}/region/r/status", 200),
    Rest("GET", f"{SHM}/region/none/status", 404),
    Rest("POST", f"{SHM}/region/none/unregister", 200),
    Rest(
        *("POST", f"{SHM}/region/r/register", 400),
        body={"key": "/parity-r", "offset": 0, "byte_size": 64},
    ),
    Rest(
        *("POST", f"{SHM}/region/x/register", 500, 400),
        row="registration of shared memory that does not exist",
        body={"key": "/parity-none", "offset": 0, "byte_size": 64},
    ),
    Rest("GET", "/v2/logging", 200),
    Rest(
        *("POST", "/v2/logging", 503, 400),
        row="a `log_format` that there is not",
        body={"log_format": "nobody's"},
    ),
    Rest("GET", "/v2/trace/setting", 200),
    Rest("GET", f"{M}/trace/setting", 200),
    Rest("GET", f"{M}/versions/1/trace/setting", 404, 400, NO_PATH),
    *(
        Rest("POST", f"/v2/{path}", 500, 400, BAD_JSON, BAD)
        for path in ("logging", "trace/setting")
    ),
    Rest("POST", "/v2/repository/index", 200, body={}),
    Rest("POST", "/v2/repository/index", 500, 400, BAD_JSON, BAD),
    Rest("POST", "/v2/repository/index", 500, 400, BAD_JSON, {"ready": "x"}),
    Rest("POST", "/v2/repository/models/m/load", 500, 400, BAD_JSON, BAD),
    Rest("POST", "/v2/repository/models/none/unload", 200, 400, BAD_UNLOAD, BAD),
    Rest("POST", "/v2/repository/models/none/unload", 200, body={}),
    Rest("POST", "/v2/repository/models/none/load", 500, 404, NO_FOLDER, {}),
    Rest("DELETE", M, 405),
    Rest("GET", "/v2/nothing", 404, 400, NO_PATH),
    Rest("GET", f"{M}/", 404, 200, SLASH),
    Rest("GET", M, 200, 403, FOREIGN, headers={"Host": "models.example.org"}),
    Rest("GET", "http://models.example.org/v2", 200, 403, FOREIGN),
    Rest("POST", f"{M}/infer", 200, 403, FOREIGN, infer_body(1.0), {"Origin": "http://a.example"}),
    Rest(
        "POST",
        f"{M}/infer",
        200,
        400,
        TRANSFER,
        CHUNKED,
        {**LAST, "Transfer-Encoding": "gzip, chunked"},
    ),
    Rest(
        *("POST", f"{M}/infer", 200, 400, BOTH_LENGTHS, PLAIN_CHUNKED),
        headers={**LAST, "Transfer-Encoding": "chunked", "Content-Length": str(len(PLAIN))},
    ),
    Rest("POST", f"{M}/infer", 501, 200, CAPITALS, PACKED, {"Content-Encoding": "GZIP"}),
]


@rows("call", RESTS)
def test_a_call_over_rest(sides, call):
    found = [side.request(call.method, call.path, call.body, call.headers) for side in sides.rest]
    ours, theirs = (reply.status for reply in found)
    assert (ours, theirs) == (call.ours or call.theirs, call.theirs), found
    assert_has_row("REST", call.row, str(theirs), str(ours))


def asked(kind: str, **fields: Any) -> Any:
    return getattr(pb, f"{kind}Request")(**fields)


def infer_in_region(name: str, offset: int = 0) -> Any:
    request = infer_request("m", 1.0)
    request.ClearField("raw_input_contents")
    where = request.inputs[0].parameters
    where["shared_memory_region"].string_param = name
    where["shared_memory_byte_size"].int64_param = 4
    where["shared_memory_offset"].int64_param = offset
    return request


def load_of(name: str) -> Any:
    return asked("RepositoryModelLoad", model_name=name)


def load_with(parameter: str) -> Any:
    request = load_of("none")
    request.parameters[parameter].string_param = "x"
    return request


@dataclass(frozen=True)
class Grpc:
    request: Any
    theirs: str = "OK"
    ours: str = ""
    row: str = ""

    @property
    def method(self) -> str:
        return type(self.request).__name__.removesuffix("Request")

    def __str__(self) -> str:
        return f"{self.method} {str(self.request)[:40].split()}"


ABOUT = ("ModelMetadata", "ModelConfig")
MISSING, WRONG = "NOT_FOUND", "INVALID_ARGUMENT"
UNKNOWN_GRPC = "ModelStatistics and TraceSetting of an unknown model"
OTHER_REPOSITORY = "a `repository_name`"
NO_MEMORY = "registration of shared memory that does not exist"
NO_NAME = "an empty name of a model"

GRPCS = [
    *(Grpc(asked(method)) for method in ("ServerLive", "ServerReady", "ServerMetadata")),
    *(Grpc(asked(method, name="m")) for method in (*ABOUT, "ModelReady", "ModelStatistics")),
    *(Grpc(asked(method, name="none"), MISSING) for method in ABOUT),
    *(Grpc(asked(method, name="m", version="9"), MISSING, WRONG, NO_VERSION) for method in ABOUT),
    *(Grpc(asked(method, name="m", version="x"), WRONG) for method in ABOUT),
    Grpc(asked("ModelReady", name="none")),
    Grpc(asked("ModelReady", name="m", version="9")),
    Grpc(asked("ModelReady", name="m", version="x"), WRONG),
    Grpc(asked("ModelStatistics", name="none"), WRONG, MISSING, UNKNOWN_GRPC),
    Grpc(asked("ModelStatistics", name="m", version="9"), WRONG),
    Grpc(asked("TraceSetting", model_name="none"), WRONG, MISSING, UNKNOWN_GRPC),
    Grpc(asked("TraceSetting", model_name="m")),
    Grpc(asked("LogSettings")),
    Grpc(infer_request("m", 1.0)),
    Grpc(infer_request("none", 1.0), MISSING),
    Grpc(infer_request("m", 1.0, model_version="9"), MISSING, WRONG, NO_VERSION),
    Grpc(asked("ModelInfer", model_name="m"), WRONG),
    Grpc(infer_in_region("r")),
    Grpc(infer_in_region("r", offset=1000), WRONG),
    Grpc(infer_in_region("none"), MISSING, WRONG, NO_REGION),
    Grpc(asked("SystemSharedMemoryStatus")),
    Grpc(asked("SystemSharedMemoryStatus", name="none"), MISSING),
    Grpc(asked("SystemSharedMemoryUnregister", name="none")),
    Grpc(
        asked("SystemSharedMemoryRegister", name="r", key="/parity-r", byte_size=64),
        "ALREADY_EXISTS",
    ),
    Grpc(
        asked("SystemSharedMemoryRegister", name="x", key="/parity-none", byte_size=64),
        *("INTERNAL", WRONG, NO_MEMORY),
    ),
    Grpc(asked("CudaSharedMemoryRegister", name="x"), WRONG),
    Grpc(asked("RepositoryIndex")),
    Grpc(asked("RepositoryIndex", repository_name="x"), "UNIMPLEMENTED", WRONG, OTHER_REPOSITORY),
    Grpc(load_with("nope"), WRONG),
    Grpc(load_of("none"), "INTERNAL", WRONG, NO_FOLDER),
    Grpc(asked("RepositoryModelUnload", model_name="none")),
    Grpc(asked("ModelReady"), "OK", WRONG, NO_NAME),
    *(Grpc(asked(method), MISSING, WRONG, NO_NAME) for method in ABOUT),
    Grpc(infer_request("", 1.0), MISSING, WRONG, NO_NAME),
    Grpc(asked("RepositoryModelLoad"), "INTERNAL", WRONG, NO_NAME),
    Grpc(asked("RepositoryModelUnload"), "OK", WRONG, NO_NAME),
]


@rows("call", GRPCS)
def test_a_call_over_grpc(sides, call):
    ours, theirs = (code_of(side, call) for side in sides.grpc)
    assert (ours, theirs) == (call.ours or call.theirs, call.theirs)
    assert_has_row("gRPC", call.row, theirs, ours)


OWN_CODES = {
    "UNKNOWN": "UNKNOWN",
    "INTERNAL": "INTERNAL",
    "INVALID_ARG": WRONG,
    "UNAVAILABLE": "UNAVAILABLE",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "CANCELLED": "CANCELLED",
    "NOT_FOUND": MISSING,
}
RAISES = f"""
name = {list(OWN_CODES)!r}[int(values[0])]
error = pb_utils.TritonError("its own words", getattr(pb_utils.TritonError, name))
return pb_utils.InferenceResponse(error=error)
"""


@pytest.mark.parametrize("code", OWN_CODES)
def test_a_code_of_the_models_own(sides, code):
    """`chooses/it` goes through the fallback server: Triton knows it by another name."""
    for name in ("chooses", "chooses/it"):
        package = write_python_model(sides.root / name, answer=RAISES)
        assert sides.rest[0].load(name, package).status in {200, 409}
    value, (ours, theirs) = float([*OWN_CODES].index(code)), sides.grpc
    told, _ = theirs.refused_infer("chooses", value)
    here = "INTERNAL" if told == MISSING else told
    assert told == OWN_CODES[code]
    for name in ("chooses", "chooses/it"):
        mesh = [("mm-model-id", name)]
        assert ours.refused_infer(name, value)[0] == here
        assert ours.refused_infer(name, value, metadata=mesh)[0] == here
    assert_has_row("gRPC", "NOT_FOUND of the model's own" if told == MISSING else "", told, here)
    kinds = [side.post("/v2/models/chooses/infer", infer_body(value)).status for side in sides.rest]
    row = {"NOT_FOUND": "a 404 of the model's own", "UNSUPPORTED": UNSUPPORTED}.get(code, "")
    assert_has_row("REST", row, str(kinds[1]), str(kinds[0]))


@rows("method", [*ABOUT, "ModelInfer", "ModelStreamInfer"])
def test_unknown_models_text_begins_as_tritons(sides, method):
    def told(calls: Calls) -> str:
        if method == "ModelStreamInfer":
            (message,) = calls.stream([infer_request("none", 1.0)])
            return str(message.error_message)
        is_infer = method == "ModelInfer"
        request = infer_request("none", 1.0) if is_infer else asked(method, name="none")
        return calls.refused(method, request)[1]

    ours, theirs = (told(side) for side in sides.grpc)
    assert theirs == "Request for unknown model: 'none' is not found"
    assert ours.startswith(f"{theirs}; ModelNotFound: ")


def test_trace_settings_go_by_the_callers_name(sides):
    """Triton knows `traced/it` by another name."""
    package = write_python_model(sides.root / "traced/it")
    sides.rest[0].load_model("traced/it", package)
    request = asked("TraceSetting", model_name="traced/it")
    request.settings["trace_rate"].value.append("7")
    settings = sides.grpc[0].call("TraceSetting", request).settings
    assert settings["trace_rate"].value == ["7"]


def code_of(calls: Calls, call: Grpc) -> str:
    return code_from(lambda: calls.call(call.method, call.request))


def code_from(act: Callable[[], Any]) -> str:
    try:
        act()
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def assert_has_row(section: str, row: str, theirs: str, ours: str) -> None:
    """The page says what is different, and nothing of what is the same."""
    assert (theirs != ours) == bool(row)
    if row:
        text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        rows = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
        assert len(rows) == 1, f"docs/v2.md, {section}: {row}"
        _, _, told, here, *_ = rows[0].split("|")
        assert theirs in told, rows
        assert ours in here, rows


# -- what is no call of V2's ---------------------------------------------------------------

NO_SERVICE = "`Health/Check` of a service that is not here"
ENCODING = "a `grpc-encoding` other than identity, deflate and gzip"
PINGS = "many pings on a connection where nothing else goes on"
TOO_LARGE = "a message above the limits [above](#grpc), of 4 MiB and 64 MiB at first"
FIRST_EVENT = "`generate_stream` that fails before its first event"
NOT_ONE = "`generate` of a model that does not answer once"


def test_health_of_unknown_service(sides):
    request = health_pb2.HealthCheckRequest(service="nothing.Here")
    ours, theirs = (
        code_from(lambda stub=stub: stub.Check(request, timeout=30))  # type: ignore[misc]
        for stub in (health_pb2_grpc.HealthStub(side.channel) for side in sides.grpc)
    )
    assert (ours, theirs) == (MISSING, "OK")
    assert_has_row("gRPC", NO_SERVICE, theirs, ours)


async def test_many_pings(sides):
    ours, theirs = [await answer_to_pings(address) for address in sides.grpc_addresses]
    assert (ours, theirs) == ("answered", "GOAWAY")
    assert_has_row("gRPC", PINGS, theirs, ours)


async def answer_to_pings(address: str) -> str:
    async with wire_to(address) as wire:
        wire.greet()
        for _ in range(20):
            wire.send(frame(frames.PING, payload=b"01234567"))
            if await first_of(wire, frames.PING, frames.GOAWAY) == frames.GOAWAY:
                return "GOAWAY"
    return "answered"


async def first_of(wire: Wire, *kinds: int) -> int:
    while (found := await wire.next()) is not None:
        if found[0] in kinds:
            return found[0]
    raise AssertionError(f"closed after {wire.got}")


async def test_a_message_in_an_unknown_encoding(sides):
    ours, theirs = [await end_of_unknown_encoding(address) for address in sides.grpc_addresses]
    assert (ours, theirs) == (frames.HEADERS, frames.RST_STREAM)
    assert_has_row("gRPC", ENCODING, "RST_STREAM", "UNIMPLEMENTED")


async def end_of_unknown_encoding(address: str) -> int:
    async with wire_to(address) as wire:
        wire.greet()
        head = head_of(INFER, (b"grpc-encoding", b"snappy"))
        wire.send(frames.header_block(1, head, end=False))
        message = prefixed(infer_request("m", 1.0).SerializeToString())
        wire.send(frame(frames.DATA, frames.END_STREAM, 1, message))
        return await first_of(wire, frames.HEADERS, frames.RST_STREAM)


def test_message_too_large_for_a_stream(sides):
    request = infer_request("m", *[0.0] * (2**24 + 1))
    ours, theirs = (list_of(side, request) for side in sides.grpc)
    assert theirs == "answered"
    assert isinstance(ours, grpc.RpcError)
    assert ours.code().name == "RESOURCE_EXHAUSTED"
    assert "message larger than max" in ours.details()
    assert not ours.details().startswith("PayloadTooLarge")
    assert_has_row("gRPC", TOO_LARGE, theirs, ours.code().name)


def list_of(calls: Calls, request: Any) -> grpc.RpcError | str:
    try:
        list(calls.stream([request]))
    except grpc.RpcError as error:
        return error
    return "answered"


def test_an_entry_of_the_index(sides):
    ours, theirs = (side.post("/v2/repository/index", {}).json() for side in sides.rest)
    (entry,) = (entry for entry in ours if entry["name"] == "m")
    assert entry == {"name": "m", "version": "1", "state": "READY", "reason": ""}
    assert {"name": "m", "version": "1", "state": "READY"} in theirs


def test_a_stream_of_events_that_fails_at_once(sides):
    write_python_model(sides.root / "fails", answer="raise ValueError('no luck')")
    assert sides.rest[0].post("/v2/repository/models/fails/load", {}).status == 200
    path = "/v2/models/fails/generate_stream"
    ours, theirs = (side.post(path, {"IN": 1.0}) for side in sides.rest)
    assert (ours.status, theirs.status) == (400, 400)
    kinds = [reply.headers["Content-Type"].partition(";")[0] for reply in (ours, theirs)]
    assert kinds == ["application/json", "text/event-stream"]
    assert "no luck" in ours.error
    assert "no luck" in json.loads(theirs.body.removeprefix(b"data: "))["error"]
    assert_has_row("REST", FIRST_EVENT, kinds[1], kinds[0])


def test_generate_with_several_answers(sides):
    write_decoupled_model(sides.root / "twice", answer="send(values); send(2 * values)")
    assert sides.rest[0].post("/v2/repository/models/twice/load", {}).status == 200
    path = "/v2/models/twice/versions/1/generate"
    ours, theirs = (side.post(path, {"IN": 1.0}) for side in sides.rest)
    assert (ours.status, theirs.status) == (400, 200)
    assert ours.json()["code"] == "InvalidRequest"
    assert ours.error == theirs.json()["error"]
    assert_has_row("REST", NOT_ONE, "200", "400")


ENSEMBLE = """
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling {
  step [{
    model_name: "step" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
  }]
}
"""


def test_an_ensemble_whose_steps_are_other_folders(sides):
    for folder in (sides.root, sides.repository):
        write_python_model(folder / "step")
        (folder / "whole" / "1").mkdir(parents=True)
        (folder / "whole" / "config.pbtxt").write_text(ENSEMBLE)
    ours, theirs = (side.post("/v2/repository/models/whole/load", {}) for side in sides.rest)
    assert (ours.status, theirs.status) == (400, 200)
    assert "has the step 'step', which is not in the package" in ours.error
    assert sides.rest[1].post("/v2/models/whole/infer", infer_body(1.0)).status == 200
    assert_has_row("REST", SIBLINGS, str(theirs.status), str(ours.status))
    unload = "/v2/repository/models/whole/unload"
    assert sides.rest[1].post(unload, {"parameters": {"unload_dependents": True}}).status == 200


# -- what other clients expect -------------------------------------------------------------


@rows("what", ["live", "ready"])
def test_health_has_the_body_that_kserves_client_reads(sides, what):
    """`InferenceRESTClient.is_server_live` is `response.json().get("live")`."""
    ours, theirs = (side.get(f"/v2/health/{what}") for side in sides.rest)
    assert ours.json() == {what: True}
    assert ours.headers["Content-Type"].startswith("application/json")
    assert theirs.body == b""


def test_opened_extensions_are_named(sides):
    ours, theirs = (side.get("/v2").json() for side in sides.rest)
    assert ours == theirs
    ours, theirs = (side.call("ServerMetadata", asked("ServerMetadata")) for side in sides.grpc)
    assert ours == theirs


def test_no_error_tells_where_the_models_lie(sides, tmp_path):
    client, calls = sides.rest[0], sides.grpc[0]
    write_python_model(sides.root / "broken", config="max_batch_size: {")
    write_python_model(sides.root / "raises", answer="raise ValueError('no')")
    assert client.post("/v2/repository/models/raises/load", {}).status == 200
    told = [
        (client.load("x", tmp_path).body.decode(), "is outside the model roots"),
        (
            client.post("/v2/repository/models/none/load", {}).body.decode(),
            "in the model roots, which --model-",
        ),
        (calls.refused("RepositoryModelLoad", load_of("none"))[1], "in the model roots"),
        (client.post("/v2/repository/models/broken/load", {}).body.decode(), "broken/config.pbtxt"),
        (calls.refused("RepositoryModelLoad", load_of("broken"))[1], "broken/config.pbtxt"),
        (client.post("/v2/models/raises/infer", infer_body(1.0)).body.decode(), "1/model.py("),
        (calls.refused_infer("raises", 1.0)[1], "1/model.py("),
    ]
    for text, words in told:
        assert words in text
        assert str(sides.root) not in text
        assert str(sides.repository) not in text


def test_generate_is_answered_in_pieces(sides):
    """However long the answer, only its begin is gathered, which may say that it is an error."""
    for side in sides.rest:
        reply = side.post("/v2/models/m/generate", {"IN": 1.0})
        assert reply.status == 200
        assert reply.headers["Transfer-Encoding"] == "chunked"
