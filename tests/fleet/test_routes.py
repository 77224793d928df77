"""Which calls a real Envoy lets through, and which it answers itself."""

import socket

import grpc
import pytest
from botocore.exceptions import ClientError

from tests.cases import rows
from tests.fleet.stubs import stub_fleet
from tests.journeys.endpoint.conftest import client_of

SERVICE = "/inference.GRPCInferenceService"
ROUTED = """
POST /endpoints/any/invocations
POST /endpoints/any/invocations-response-stream
GET /v2
GET /v2/
GET /v2/health/live
GET /v2/health/ready
GET /v2/models/m.tar.gz
GET /v2/models/a%2Fb
GET /v2/models/m/
GET /v2/models/m/versions/1
GET /v2/models/stat
GET /v2/models/start
GET /v2/models/stats2
GET /v2/models/stats/stats
GET /v2/models/m/ready
GET /v2/models/m/versions/1/ready
GET /v2/models/m/config
GET /v2/models/m/stats
GET /v2/models/m/stats?x=1
POST /v2/models/m/infer
POST /v2/models/m/infer/
POST /v2/models/m/versions/12/infer
POST /v2/models/m/generate
POST /v2/models/m/generate_stream
GET /ping
"""
NOT_ROUTED = """
GET /v2/models/stats
GET /v2/models/stats/
GET /v2/models/stats?m
GET /v2/models/%73tats
GET /v2/models/%73t%61ts/
GET /v2/models/./stats
GET /v2/models/m/../stats
GET /v2/models/m/trace/setting
POST /v2/models/m/trace/setting
GET /v2/trace/setting
POST /v2/logging
GET /v2/systemsharedmemory/status
POST /v2/repository/index
POST /v2/repository/models/m/unload
POST /v2/models/../repository/models/m/unload
POST /v2/models/..%2frepository/models/m/unload
POST /v2/models/m/load
POST /v2/models/m/versions/x/infer
GET /v2/models
GET /v2/models/
GET /v2/models//stats
GET /v2/health
GET /v2/health/other
GET /v2x
GET /models
POST /models
DELETE /models/m
POST /models/m/invoke
GET /ping/
GET /readyz
GET /metrics
GET /
"""
METHODS = {
    *("ModelInfer", "ModelStreamInfer", "ModelReady", "ModelMetadata", "ModelConfig"),
    *("ServerLive", "ServerReady", "ServerMetadata"),
}
# the first lists models, where its message names none
NOT_METHODS = {
    *("ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    *("TraceSetting", "LogSettings", "SystemSharedMemoryStatus", "ModelInferX"),
}


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("envoy")
    with stub_fleet(folder, 1, lambda call: call.answer(200)) as (machines, envoy):
        yield machines[0], envoy


def status_of(envoy, line: str) -> int:
    """Send it as it stands: a library would put the path in order."""
    host, _, port = envoy.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as own:
        head = f"{line} HTTP/1.1\r\nHost: any\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        own.sendall(head.encode())
        answer = b"".join(iter(lambda: own.recv(2**16), b""))
    return int(answer.split()[1])


@rows("line", lines(ROUTED))
def test_calls_about_a_model_keep_machine_and_path(fleet, line):
    machine, envoy = fleet
    machine.asked.clear()
    assert status_of(envoy, line) == 200
    assert machine.asked == [line]


@rows("line", lines(NOT_ROUTED))
def test_machines_own_paths_are_404_at_the_fleet(fleet, line):
    machine, envoy = fleet
    machine.asked.clear()
    assert status_of(envoy, line) == 404
    assert machine.asked == []


@rows("method", sorted(METHODS | NOT_METHODS))
def test_over_grpc_the_same_holds(fleet, method):
    machine, envoy = fleet
    machine.asked.clear()
    with grpc.insecure_channel(envoy.address) as channel:
        try:
            channel.unary_unary(f"{SERVICE}/{method}")(b"", timeout=10)
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
    assert code == ("OK" if method in METHODS else "UNIMPLEMENTED")
    assert machine.asked == ([f"{SERVICE}/{method}"] if method in METHODS else [])


def test_boto3_gets_service_unavailable_without_machines(tmp_path):
    with stub_fleet(tmp_path, 1, lambda call: call.answer(200)) as ([machine], envoy):
        machine.is_up = False
        envoy.wait_for()
        with pytest.raises(ClientError) as error:
            client_of(envoy.address).invoke_endpoint(
                EndpointName="any", TargetModel="m", Body=b"{}", ContentType="application/json"
            )
    told = error.value.response
    assert told["Error"]["Code"] == "ServiceUnavailable"
    assert "no healthy upstream" in told["Error"]["Message"]
