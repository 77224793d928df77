"""/metrics of the real command: in Prometheus's form, and no larger for what callers choose."""

import gzip
import json
import re
import secrets
import socket
import time

import grpc
import pytest

from tests.grpc_calls import calls_to
from tests.journeys.memory.models import counted
from tests.journeys.observability.promtool import needs_promtool, promtool
from tests.running import EXAMPLES, Client, RunningAdapter, wait_until
from tests.trees import infer_body

pytestmark = pytest.mark.triton


def page(adapter: RunningAdapter) -> str:
    with Client(adapter.admin) as admin:
        return admin.get("/metrics").body.decode()


def ask_of_everything(adapter: RunningAdapter, word: str) -> None:
    """`word` wherever a caller may put one of its own."""
    with adapter.client() as client:
        client.load(word, EXAMPLES / "identity")
        client.load(f"{word}-none", f"/{word}")
        client.invoke(word)
        client.post(f"/models/{word}/invoke", {word: word}, {"X-Request-Id": word})
        client.post(f"/v2/models/{word}/infer", infer_body(1.0))
        for method in ("GET", "POST", "PUT", word.upper()):
            for path in (f"/{word}", f"/models/{word}", f"/v2/{word}", f"/v2/models/{word}/{word}"):
                client.request(method, path)
        client.unload(word)
    with calls_to(adapter.grpc) as calls:
        calls.refused_infer(word, 1.0)
        unknown = calls.channel.unary_unary(f"/inference.GRPCInferenceService/{word}")
        with pytest.raises(grpc.RpcError):
            unknown(b"", timeout=30)


def series_of(text: str) -> set[str]:
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


def test_nothing_that_callers_choose_makes_a_series(adapter):
    ask_of_everything(adapter, "any")  # a second load has a size that was learned from the first
    first, second = f"first{secrets.token_hex(4)}", f"second{secrets.token_hex(4)}"
    ask_of_everything(adapter, first)
    before = page(adapter)
    ask_of_everything(adapter, second)
    after = page(adapter)
    assert series_of(after) == series_of(before)
    assert first not in before.lower()
    assert second not in after.lower()


def test_a_model_is_named_while_it_is_loaded(adapter):
    name = f'a"b\\n{secrets.token_hex(4)}\n# EOF'
    label = 'model="' + name.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') + '"'
    with adapter.client() as client:
        client.load_model(name, EXAMPLES / "identity")
        for _ in range(3):
            assert client.invoke(name).status == 200
        assert counted(adapter, f"triton_adapter_model_requests_total{{{label}}}") == 3
        assert 0 <= counted(adapter, f"triton_adapter_model_last_used_seconds{{{label}}}") < 60
        labels = re.escape(f'device="host",{label},state="READY"')
        taken = rf"^triton_adapter_model_bytes{{{labels}}} (\S+)"
        [found] = re.findall(taken, page(adapter), re.MULTILINE)
        assert float(found) > 2**20
        client.unload_model(name)
    assert label not in page(adapter)
    assert counted(adapter, "triton_adapter_models_without_series") == 0


# what Prometheus 2.42 sends
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "content_type", "end"),
    [
        (PROMETHEUS, "application/openmetrics-text; version=1.0.0; charset=utf-8", b"# EOF\n"),
        ("text/plain", "text/plain; version=0.0.4; charset=utf-8", b"\n"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8", b"\n"),
        ("application/openmetrics-text;version=x", "text/plain; version=0.0.4", b"\n"),
    ],
)
def test_log_has_the_requested_form(adapter, accept, content_type, end):
    with Client(adapter.admin) as admin:
        reply = admin.get("/metrics", Accept=accept)
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith(content_type)
    assert reply.body.endswith(end)
    assert (b"# EOF" in reply.body) is (end == b"# EOF\n")


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip", True), ("deflate, GZIP;q=0.8", True), ("identity", False), ("br", False)],
)
def test_page_is_compressed_for_clients_that_can(adapter, accepted, is_packed):
    with Client(adapter.admin) as admin:
        reply = admin.get("/metrics", **{"Accept-Encoding": accepted})
        bare = admin.get("/metrics")
    assert bare.headers["Content-Encoding"] is None
    assert reply.headers["Content-Encoding"] == ("gzip" if is_packed else None)
    assert "Accept-Encoding" in reply.headers["Vary"]
    text = gzip.decompress(reply.body) if is_packed else reply.body
    assert series_of(text.decode()) == series_of(bare.body.decode())
    if is_packed:
        assert len(reply.body) * 4 < len(text)


def test_a_ping_is_counted_as_one(adapter):
    series = 'triton_adapter_requests_total{code="200",frontend="sagemaker",method="ping"}'
    before = counted(adapter, series)
    with adapter.client() as client:
        assert client.get("/ping").status == 200
    assert counted(adapter, series) == before + 1


@needs_promtool
def test_promtool_finds_no_fault(adapter):
    ask_of_everything(adapter, "any")
    promtool("check", "metrics", given=page(adapter).encode())


def test_request_time_is_tritons_and_the_adapters(adapter):
    labels = '{frontend="sagemaker",method="invoke"}'
    names = ("request", "upstream", "overhead")

    def figures() -> list[tuple[float, float]]:
        kinds = [f"triton_adapter_{name}_seconds" for name in names]
        return [
            (counted(adapter, f"{k}_count{labels}"), counted(adapter, f"{k}_sum{labels}"))
            for k in kinds
        ]

    with adapter.client() as client:
        client.load_model("echo", EXAMPLES / "identity")
        before = figures()
        for _ in range(5):
            assert client.invoke("echo").status == 200
        assert client.invoke("none").status == 404
        after = figures()
    counts = [new[0] - old[0] for new, old in zip(after, before, strict=True)]
    assert counts == [6, 5, 5]  # what Triton was not asked for has no share of it
    total, upstream, own = [new[1] - old[1] for new, old in zip(after, before, strict=True)]
    assert 0 < upstream < total
    assert 0 < own < total


@pytest.mark.parametrize("way", ["planned", "handled"])
def test_slow_callers_time_is_not_the_adapters(adapter, way):
    """A small body is gathered before Triton is asked. A repeated header has no plan."""
    labels = '{frontend="sagemaker",method="invoke"}'
    with adapter.client() as client:
        client.load("echo", EXAMPLES / "identity")
    in_flight = 'triton_adapter_requests_in_flight{frontend="sagemaker"}'
    body = json.dumps(infer_body(1.0)).encode()
    head = f"POST /models/echo/invoke HTTP/1.1\r\nHost: {adapter.http}\r\n"
    head += "X-A: 1\r\nX-A: 2\r\n" if way == "handled" else ""
    head += f"Content-Length: {len(body)}\r\n\r\n"
    host, _, port = adapter.http.rpartition(":")

    def took() -> tuple[float, float]:
        """Return what the adapter took of one such request, and what its caller did."""
        names = [f"triton_adapter_{name}_seconds_sum{labels}" for name in ("overhead", "caller")]
        before = [counted(adapter, name) for name in names]
        with socket.create_connection((host, int(port)), timeout=30) as caller:
            caller.sendall(head.encode() + body[:10])
            wait_until(lambda: counted(adapter, in_flight) == 1, 30, "the head has come")
            time.sleep(0.4)  # it is slow
            caller.sendall(body[10:])
            assert caller.recv(1000).startswith(b"HTTP/1.1 200")
        own, callers = (
            counted(adapter, name) - old for name, old in zip(names, before, strict=True)
        )
        return own, callers

    tries = [took()]
    while tries[-1][0] >= tries[-1][1] and len(tries) < 5:  # the machine took its time for it
        tries.append(took())
    own, callers = tries[-1]

    assert callers > 0.3
    assert own < callers


def test_metrics_show_build_and_idle_times(adapter):
    found = page(adapter)
    assert re.search(
        r'^triton_adapter_build_info\{python="3[^"]*",triton="embedded",version="',
        found,
        re.MULTILINE,
    )
    assert re.search(r"^triton_adapter_ready 1.0$", found, re.MULTILINE)
    assert not re.search(r"^triton_adapter_least_recently_used_seconds ", found, re.MULTILINE)
    with adapter.client() as client:
        client.load_model("echo", EXAMPLES / "identity")
    idle = counted(adapter, "triton_adapter_least_recently_used_seconds")
    assert 0 <= idle < 60
