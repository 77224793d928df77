"""With a control_token nobody loads, unloads or drains over TCP without it; sockets want none."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as v2

from adapter._proto import model_runtime_pb2 as mesh
from adapter.cli.client import Target, ask
from adapter.frontends.routes import ADMIN_ROUTES, Scope
from tests.asking import RawConnection
from tests.cases import rows
from tests.processes import tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, wait_until

pytestmark = pytest.mark.triton

TOKEN = "canary-7f3a9c0e51d24b86"  # noqa: S105 - it opens nothing else
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
# what is no token of the adapter's, and what a refusal says of it
WRONG = (
    ({}, 'Bearer realm="triton-adapter"'),
    ({"Authorization": "Basic dXNlcjpwYXNz"}, 'Bearer realm="triton-adapter"'),
    ({"Authorization": TOKEN}, 'Bearer realm="triton-adapter"'),
    ({"Authorization": "Bearer"}, 'Bearer realm="triton-adapter", error="invalid_token"'),
    ({"Authorization": f"Bearer {TOKEN}x"}, 'Bearer realm="triton-adapter", error="invalid_token"'),
    (
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        'Bearer realm="triton-adapter", error="invalid_token"',
    ),
    ({"Authorization": "Bearer größe"}, 'Bearer realm="triton-adapter", error="invalid_token"'),
)
OF_ADMIN = [route.path for route in ADMIN_ROUTES.values() if route.scope is not Scope.CONTROL]
ENDING_WORK = [route.path for route in ADMIN_ROUTES.values() if route.scope is Scope.CONTROL]
WANT_TOKEN = {"RepositoryModelLoad", "RepositoryModelUnload"}
METHODS = [
    (service.full_name, method.name, method.input_type.name)
    for file in (v2.DESCRIPTOR, mesh.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def token_of(file: Path) -> dict[str, str]:
    return {"ADAPTER_CONTROL_TOKEN": f"file:{file}"}


@pytest.fixture(scope="module")
def adapter(root, token_file) -> Iterator[RunningAdapter]:
    flags = (f"--model-roots={root}", COMPLETE, "--grpc-data=127.0.0.1:0")
    with embedded_adapter(*flags, environ=token_of(token_file)) as adapter:
        with adapter.client() as client:
            loading = {"model_name": "echo", "url": str(root / "echo")}
            assert client.post("/models", loading, RIGHT).status == 200
        yield adapter


def states(adapter: RunningAdapter) -> dict[str, str]:
    return {model["model_id"]: model["state"] for model in adapter.state()["models"]}


@rows(("headers", "challenge"), WRONG)
def test_rest_control_call_without_token_is_401(adapter, client, headers, challenge):
    """Which calls want the token: tests/openapi/test_refusals.py."""
    encoded = {name: value.encode() for name, value in headers.items()}

    reply = client.request("DELETE", "/models/echo", headers=encoded)

    assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, challenge)
    assert reply.code == "Unauthenticated"
    assert states(adapter) == {"echo": "READY"}


@pytest.mark.parametrize("headers", [headers for headers, _ in WRONG[:2]])
@pytest.mark.parametrize("path", ["/models/{}", "/v2/repository/models/{}/unload"])
def test_refusals_do_not_reveal_whether_models_exist(client, path, headers):
    def told(name: str) -> tuple[int, dict[str, str], str]:
        method = "DELETE" if path == "/models/{}" else "POST"
        reply = client.request(method, path.format(name), headers=headers)
        shown = {
            key: value
            for key, value in reply.headers.items()
            if key not in {"Date", "Content-Length"}
        }
        return reply.status, shown, reply.body.decode().replace(name, "NAME")

    assert told("echo") == told("nobody")


def test_second_authorization_header_is_refused(adapter):
    lines = [
        "DELETE /models/echo HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {TOKEN}",
        "Authorization: Bearer another-token-0000",
    ]
    with RawConnection(adapter.http) as caller:
        caller.send("\r\n".join([*lines, "\r\n"]).encode())
        status, _ = caller.read_answer()
    assert status == 401


def test_token_opens_control_calls(adapter, client, root):
    for scheme in ("Bearer", "bearer"):
        right = {"Authorization": f"{scheme} {TOKEN}"}
        loading = {"model_name": "second", "url": str(root / "echo")}
        assert client.post("/models", loading, right).status == 200
        assert client.request("DELETE", "/models/second", headers=right).status == 200
    assert client.post("/v2/repository/models/echo/load", {}, RIGHT).status == 200
    assert states(adapter) == {"echo": "READY"}


def call(
    adapter: RunningAdapter, listener: str, method: tuple[str, str, str], *metadata: tuple[str, str]
):
    """The code and the words with which an empty message is answered."""
    service, name, _ = method
    with grpc.insecure_channel(adapter.listeners[listener]) as channel:
        path = f"/{service}/{name}"
        try:
            if name == "ModelStreamInfer":
                list(channel.stream_stream(path)(iter([b""]), timeout=30, metadata=metadata))
            else:
                channel.unary_unary(path)(b"", timeout=30, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


@rows("metadata", [(), (("authorization", f"Bearer {TOKEN}x"),), (("authorization", TOKEN),)])
@rows("method", METHODS)
def test_grpc_control_and_mesh_calls_want_token(adapter, method, metadata):
    service, name, _ = method
    wants = name in WANT_TOKEN or service == "mmesh.ModelRuntime"

    code, words = call(adapter, "grpc", method, *metadata)

    assert (code == "UNAUTHENTICATED") is wants, (code, words)
    assert words.startswith("Unauthenticated: ") is wants
    assert states(adapter) == {"echo": "READY"}


def test_grpc_refusals_do_not_reveal_whether_models_exist(adapter):
    def told(name: str) -> tuple[str, str]:
        with grpc.insecure_channel(adapter.grpc) as channel:
            stub = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelUnload")
            message = v2.RepositoryModelUnloadRequest(model_name=name).SerializeToString()
            with pytest.raises(grpc.RpcError) as caught:
                stub(message, timeout=30)
        return caught.value.code().name, caught.value.details()

    assert told("echo") == told("nobody")


def test_over_grpc_the_token_is_the_metadata_authorization(adapter):
    bearer = ("authorization", f"Bearer {TOKEN}")
    assert call(adapter, "grpc", ("mmesh.ModelRuntime", "modelSize", ""), bearer)[0] == "NOT_FOUND"
    with grpc.insecure_channel(adapter.grpc) as channel:
        service = "/inference.GRPCInferenceService/RepositoryModel"
        for act, kind in (
            ("Load", v2.RepositoryModelLoadRequest),
            ("Unload", v2.RepositoryModelUnloadRequest),
        ):
            message = kind(model_name="echo").SerializeToString()
            channel.unary_unary(f"{service}{act}")(message, timeout=60, metadata=[bearer])
        assert states(adapter) == {}
        message = v2.RepositoryModelLoadRequest(model_name="echo").SerializeToString()
        channel.unary_unary(f"{service}Load")(message, timeout=60, metadata=[bearer])
    assert states(adapter) == {"echo": "READY"}


def test_health_and_reflection_over_grpc_want_no_token(adapter):
    with grpc.insecure_channel(adapter.grpc) as channel:
        message = health_pb2.HealthCheckRequest(service="mmesh.ModelRuntime").SerializeToString()
        channel.unary_unary("/grpc.health.v1.Health/Check")(message, timeout=30)
    for listener in ("grpc", "grpc_data"):
        reflection = ("grpc.reflection.v1.ServerReflection", "ServerReflectionInfo", "")
        with grpc.insecure_channel(adapter.listeners[listener]) as channel:
            path = f"/{reflection[0]}/{reflection[1]}"
            list(channel.stream_stream(path)(iter([b""]), timeout=30))


@pytest.mark.parametrize("path", ENDING_WORK)
def test_admin_wants_the_token_to_end_work(adapter, path):
    with Client(adapter.admin) as admin:
        statuses = {path: admin.get(path).status for path in OF_ADMIN}
        # the models of the stores are listed nowhere: this adapter has no store
        assert statuses == dict.fromkeys(OF_ADMIN, 200) | {"/store/models": 404}
        for headers, challenge in WRONG[:5]:
            reply = admin.post(path, None, headers)
            assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, challenge)
        assert admin.get("/readyz").status == 200


def test_sockets_of_the_file_system_want_no_token(root, tmp_path):
    places = {name: tmp_path / f"{name}.sock" for name in ("http", "grpc", "admin")}
    flags = [f"--{name}=unix:{path}" for name, path in places.items()]
    environ = {"ADAPTER_CONTROL_TOKEN": TOKEN}
    with embedded_adapter(*flags, COMPLETE, f"--model-roots={root}", environ=environ) as adapter:
        http, admin = (Target(socket_path=str(places[name])) for name in ("http", "admin"))
        body = json.dumps({"model_name": "echo", "url": str(root / "echo")}).encode()
        assert ask(http, "POST", "/models", body).status == 200
        assert ask(http, "DELETE", "/models/echo").status == 200
        status = ("mmesh.ModelRuntime", "runtimeStatus", "")
        wait_until(lambda: call(adapter, "grpc", status)[0] == "OK", 30, "the mesh is answered")
        assert ask(admin, "POST", "/drain?timeout=60").status == 200


def command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "adapter", *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("how", ["variable", "file"])
def test_commands_send_the_token_of_environment_or_file(adapter, root, token_file, how):
    given = {"variable": {"ADAPTER_CONTROL_TOKEN": TOKEN}, "file": token_of(token_file)}[how]
    url = f"--url=http://{adapter.http}"

    loaded = command("load", "by-command", str(root / "echo"), url, **given)
    unloaded = command("unload", "by-command", url, **given)

    assert (loaded.returncode, unloaded.returncode) == (0, 0), loaded.stderr + unloaded.stderr


def test_command_without_token_says_what_to_set(adapter, root):
    url = f"--url=http://{adapter.http}"
    refused = command("load", "by-command", str(root / "echo"), url)
    assert refused.returncode == 1
    assert "401 Unauthenticated" in refused.stderr
    assert "ADAPTER_CONTROL_TOKEN" in refused.stderr
    refused = command("drain", "--timeout=1", f"--url=http://{adapter.admin}")
    assert refused.returncode == 1
    assert "401" in refused.stderr
    assert "ADAPTER_CONTROL_TOKEN" in refused.stderr


@pytest.mark.parametrize("how", ["variable", "file"])
def test_the_token_is_shown_nowhere(root, token_file, how):
    """Not by what the adapter writes, not by what it answers, not by Triton's environment."""
    given = {"ADAPTER_CONTROL_TOKEN": TOKEN}
    if how == "file":
        given = token_of(token_file)
    shown = [command("check-config", *json_or_not, **given) for json_or_not in ([], ["--json"])]
    assert [ended.returncode for ended in shown] == [0, 0]
    seen = [ended.stdout + ended.stderr for ended in shown]
    assert "***" in seen[0]

    with embedded_adapter(
        f"--model-roots={root}", COMPLETE, "--log-level=debug", environ=given
    ) as adapter:
        with adapter.client() as client, Client(adapter.admin) as admin:
            for headers in (RIGHT, {"Authorization": f"Bearer x{TOKEN}"}):
                client.post("/models", {"model_name": "n", "url": "/nowhere"}, headers)
                client.request("DELETE", "/models/n", headers=headers)
            bearer = ("authorization", f"Bearer {TOKEN}")
            call(adapter, "grpc", ("mmesh.ModelRuntime", "loadModel", ""), bearer)
            seen += [admin.get(path).body.decode() for path in OF_ADMIN]
            drain = ("drain", "--timeout=60", f"--url=http://{adapter.admin}")
            assert command(*drain, **given).returncode == 0
        seen.append(
            Path(f"/proc/{tritonserver(adapter)}/environ").read_bytes().decode(errors="replace")
        )
    seen += [json.dumps(adapter.lines), adapter.errors]
    assert [text for text in seen if TOKEN in text] == []
