"""Load on a real gRPC server: the client is our own, so it has to be a good one."""

import pytest

from tests.bench.servers import holds_once


def test_every_call_is_sent_and_counted(bench, grpc_server):
    bench(grpc_server.url, "--model=m", "--count=200", "--connections=3")

    assert (bench.code, bench.target["answered"], grpc_server.seen["m"]) == (0, 200, 200)


def test_several_calls_share_a_connection(bench, grpc_server):
    bench(grpc_server.url, "--model=m", "--count=100", "--connections=1", "--streams=10")

    assert (bench.code, grpc_server.seen["m"]) == (0, 100)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.slow
def test_large_messages_obey_flow_control_both_ways(bench, grpc_server, streams):
    args = ("--shape=IN=1048576,2", "--count=8", "--connections=1", f"--streams={streams}")

    bench(grpc_server.url, "--model=m", *args)

    assert (bench.code, bench.target["answered"]) == (0, 8)
    assert grpc_server.largest > 2**23


def test_errors_are_counted_by_status(bench, grpc_server):
    bench(grpc_server.url, "--models=m,missing", "--count=60")

    (error,) = bench.target["errors_by_code"]
    assert bench.code == 1
    assert (error["code"], error["count"]) == ("NOT_FOUND", grpc_server.seen["missing"])
    assert error["example"] == "no model\nof that näme"
    assert bench.target["answered"] == grpc_server.seen["m"]


@pytest.mark.slow
def test_a_call_without_an_answer_in_time_is_an_error_and_others_go_on(bench, grpc_server):
    args = ("--count=12", "--connections=1", "--streams=8", "--timeout=2", "--interval=0.1")

    bench(grpc_server.url, "--models=m,mute", *args)

    assert bench.errors == {"timeout": grpc_server.seen["mute"]}
    assert bench.target["answered"] == grpc_server.seen["m"] > 0


def test_headers_are_metadata(bench, grpc_server):
    bench(grpc_server.url, "--models=a,b", "--count=40", "--header=Mm-Model-Id:{model}")

    assert bench.code == 0
    assert grpc_server.metadata == grpc_server.seen


@pytest.mark.parametrize("value", ["always", "{hex8}"])
def test_a_header_of_all_calls_is_metadata_of_each(bench, grpc_server, value):
    bench(grpc_server.url, "--models=a,b", "--count=40", f"--header=X-Every:{value}",
          "--header=Mm-Model-Id:{model}")  # fmt: skip

    assert bench.code == 0
    assert grpc_server.metadata == grpc_server.seen
    assert len(grpc_server.every) == (1 if value == "always" else 40)


@pytest.mark.slow
def test_an_open_loop_keeps_the_rate(bench, grpc_server):
    def is_kept() -> bool:
        bench(grpc_server.url, "--model=m", "--rate=100", "--count=50", "--connections=4")
        assert bench.target["answered"] == 50
        return bench.target["rate"] == pytest.approx(100, rel=0.2)

    assert holds_once(is_kept)


def test_an_http_server_is_not_taken_for_a_grpc_server(bench, server):
    args = ("--count=1", f"--metadata={server.url}")

    bench(server.url.replace("http", "grpc"), "--model=m", *args)

    assert bench.code == 1
    assert bench.problems
