"""Load on HTTP servers: what is counted, and when."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from adapter import cli
from adapter.tools.bench.results import plural
from tests.bench.servers import HttpServer, holds_once

LAUNCHER = """
import sys
from tests.bench.servers import parse
from adapter.tools.bench.command import run
sys.exit(run(parse(*sys.argv[1:]), {}))
"""


def test_every_request_of_a_count_is_sent_and_counted(bench, server):
    bench(server.url, "--model=m", "--count=200", "--connections=4")

    assert (bench.code, bench.target["answered"], server.seen["m"]) == (0, 200, 200)
    assert sum(each["answered"] for each in bench.target["timeline"]) == 200


@pytest.mark.slow
def test_a_duration_ends_the_run(bench, server):
    bench(server.url, "--model=m", "--duration=0.5", "--connections=1")

    assert bench.code == 0
    assert 0.3 < bench.target["seconds"] < 60
    assert bench.target["answered"] == server.seen["m"]


def test_a_warm_up_does_not_count(bench, server):
    bench(server.url, "--model=m", "--count=10", "--warmup=0.2")

    assert bench.target["answered"] == 10
    assert server.seen["m"] > 10


@pytest.mark.parametrize("protocol", ["sagemaker-json", "v2-json", "endpoint-json"])
def test_json_is_made_from_the_metadata(bench, server, protocol):
    bench(server.url, "--model=m", "--count=1", "--batch=3", f"--protocol={protocol}")

    headers, body = server.bodies[0]
    (given,) = json.loads(body)["inputs"]
    assert bench.code == 0
    assert headers["Content-Type"] == "application/json"
    assert (given["name"], given["datatype"], given["shape"]) == ("IN", "FP32", [3, 2])
    assert len(given["data"]) == 6
    assert server.seen == {"m": 1}


@pytest.mark.parametrize("protocol", ["sagemaker-binary", "v2-binary"])
def test_binary_tensors_follow_their_json(bench, server, protocol):
    bench(server.url, "--model=m", "--count=1", "--shape=IN=50000,2", f"--protocol={protocol}")

    headers, body = server.bodies[0]
    if protocol == "v2-binary":
        size = int(headers["Inference-Header-Content-Length"])
    else:
        size = int(headers["Content-Type"].partition("json-header-size=")[2])
    (given,) = json.loads(body[:size])["inputs"]
    assert bench.code == 0
    assert given["shape"] == [50000, 2]
    assert given["parameters"]["binary_data_size"] == len(body) - size == 400_000


def test_a_payload_file_is_sent_as_it_is(bench, server, tmp_path):
    text = (
        '{"id": "x",  "inputs": [{"name": "IN", "datatype": "INT8", "shape": [2], "data": [1,2]}]}'
    )
    (tmp_path / "in.json").write_text(text)

    bench(server.url, "--model=m", "--count=1", f"--payload={tmp_path / 'in.json'}")

    assert server.bodies[0][1].decode() == text


def test_a_header_may_name_the_model(bench, server):
    bench(server.url, "--model=m", "--count=1", "--header=X-Target: {model}.tgz")

    assert server.bodies[0][0]["X-Target"] == "m.tgz"


@pytest.mark.parametrize("shape", [(), ("--shape=IN=50000,2",)])
def test_digits_of_a_header_are_others_in_each_request(bench, server, shape):
    trace = "00-{hex32}-{hex16}-01"

    bench(server.url, "--model=m", "--count=5", f"--header=traceparent: {trace}", *shape)

    seen = [headers["traceparent"] for headers, _ in server.bodies]
    assert bench.code == 0
    assert len(set(seen)) == 5
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", each) for each in seen)


def test_recorded_heads_are_sent_in_turn_with_what_this_request_needs(bench, server, tmp_path):
    (tmp_path / "one").write_text(
        "# a client 1.0\nPOST /elsewhere HTTP/1.1\nHost: elsewhere\nuser-agent: one\n"
        "content-length: 3\nInference-Header-Content-Length: 3\nX-Id: {hex8}\n"
    )
    (tmp_path / "other").write_text("POST / HTTP/1.1\r\nUser-Agent: other of {model}\r\n\r\n")
    heads = [f"--head={tmp_path / name}" for name in ("one", "other")]

    bench(server.url, "--models=a,b", "--count=40", "--connections=1", *heads)

    one, other = (headers for headers, _ in server.bodies[:2])
    assert bench.code == 0
    assert [name.lower() for name in one] == [
        *("host", "user-agent", "content-length", "x-id"),
    ]
    assert one["Host"] in server.url
    assert other["User-Agent"] in {"other of a", "other of b"}
    assert [headers["user-agent"][:3] for headers, _ in server.bodies] == ["one", "oth"] * 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [("Host: x\n", "request line"), ("", "request line"),
     ("POST / HTTP/1.1\nTransfer-Encoding: chunked\n", "with a length"),
     ("POST / HTTP/1.1\nno header\n", "NAME:VALUE")],
)  # fmt: skip
def test_a_file_that_is_no_head_is_refused(bench, server, tmp_path, text, reason):
    (tmp_path / "head").write_text(text)

    bench(server.url, "--model=m", "--count=1", f"--head={tmp_path / 'head'}")

    assert reason in bench.problems[0]


def test_errors_are_counted_by_status_and_code_with_an_example(bench, server):
    bench(server.url, "--models=m,busy,broken", "--count=90")

    counts = {"503 ModelNotReady": server.seen["busy"], "500": server.seen["broken"]}
    assert bench.code == 1
    assert bench.errors == counts
    assert bench.target["errors"] == sum(counts.values())
    assert {each["example"] for each in bench.target["errors_by_code"]} == {"later", "it raised"}


def test_a_connection_that_the_server_closes_after_an_answer_is_no_error(bench, server):
    bench(server.url, "--model=closing", "--count=20", "--connections=2")

    assert (bench.code, bench.target["answered"]) == (0, 20)


def test_a_connection_that_is_lost_before_the_answer_is_an_error_and_the_run_goes_on(bench, server):
    bench(server.url, "--models=m,rude", "--count=40", "--connections=2")

    assert bench.errors == {"connection": server.seen["rude"]}
    assert bench.target["answered"] == server.seen["m"] > 0


@pytest.mark.slow
def test_a_request_without_an_answer_in_time_is_an_error(bench, server):
    bench(server.url, "--model=mute", "--count=2", "--timeout=0.2", "--interval=0.1")

    assert (bench.code, bench.errors) == (1, {"timeout": 2})


def test_nobody_there_is_said_and_not_measured(bench, server, tmp_path):
    path = tmp_path / "nobody.sock"

    bench(f"unix:{path}", "--model=m", "--count=1")

    assert bench.code == 1
    assert str(path) in bench.problems[0]


def test_a_unix_socket_is_a_listener_as_well(bench, tmp_path):
    server = HttpServer(tmp_path / "s")
    try:
        bench(server.url, "--model=m", "--count=5")
    finally:
        server.close()

    assert (bench.code, server.seen["m"]) == (0, 5)


def test_popular_models_get_more_requests(bench, server):
    bench(server.url, "--models=a,b,c", "--count=1100", "--zipf=1", "--connections=2")

    shares = [server.seen[name] / 1100 for name in "abc"]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.05)


def test_all_models_of_all_pages_of_the_list_are_used(bench, server):
    bench(server.url, "--models-from-list", "--count=100")

    assert set(server.seen) == {"a", "b", "c"}
    assert bench.result["options"]["models"] == 3


def stall_once(server, seconds=1.0):
    """At the twentieth request from now on."""
    before = server.seen.total()

    def look(number: int) -> None:
        if number == before + 20:
            server.stall(seconds)

    server.on_request = look


@pytest.mark.slow
def test_an_open_loop_shows_a_stall_in_all_requests_that_were_due_meanwhile(bench, server):
    """Coordinated omission: 1 s of 3 s stalled, so a third of the callers waited up to 1 s."""

    def is_shown() -> bool:
        stall_once(server)
        bench(server.url, "--model=m", "--rate=100", "--duration=3", "--connections=4")
        latency = bench.target["latency"]
        assert bench.target["answered"] == 300
        assert latency["p99"] > 0.9
        assert latency["p90"] > 0.5
        return latency["p50"] < 0.5

    assert holds_once(is_shown)


@pytest.mark.slow
def test_a_closed_loop_sees_the_same_stall_in_one_request_only(bench, server):

    def is_seen() -> bool:
        stall_once(server)
        bench(server.url, "--model=m", "--count=300", "--connections=1")
        assert bench.target["latency"]["max"] > 0.5
        return bench.target["latency"]["p99"] < 0.5

    assert holds_once(is_seen)


@pytest.mark.slow
def test_what_an_open_loop_could_not_send_in_time_is_an_error(bench, server):
    args = ("--rate=50", "--count=20", "--connections=1", "--timeout=0.5", "--interval=0.1")

    def are_both() -> bool:
        bench(server.url, "--model=mute", *args)
        assert bench.code == 1
        assert bench.target["errors"] == 20
        return set(bench.errors) == {"timeout", "unsent"}

    assert holds_once(are_both)


@pytest.mark.slow
def test_poisson_arrivals_come_at_the_rate(bench, server):
    bench(server.url, "--model=m", "--rate=200", "--duration=1.5", "--arrivals=poisson")

    assert bench.target["answered"] == pytest.approx(300, rel=0.25)


@pytest.mark.slow
def test_churn_loads_and_unloads_in_turn_and_leaves_nothing(bench, server):
    args = ("--duration=0.8", "--connections=1", "--churn=/models/big", "--churn-every=0.2")

    def is_in_time() -> bool:
        server.changes.clear()
        bench(server.url, "--model=m", *args)
        operations = [each for each, _ in server.changes]
        assert bench.code == 0
        assert server.changes[0] == ("load", {"model_name": "bench-churn", "url": "/models/big"})
        assert operations == ["load", "unload"] * (len(operations) // 2)
        assert [each["operation"] for each in bench.target["churn"]] == operations
        ats = [each["at"] for each in bench.target["churn"]]
        assert ats == sorted(ats)
        return len(operations) >= 4 and ats[1] == pytest.approx(0.2, abs=0.15)

    assert holds_once(is_in_time)


def test_what_the_churn_has_loaded_is_unloaded_at_the_end(bench, server):
    bench(server.url, "--model=m", "--count=5", "--churn=/models/big", "--churn-every=60")

    assert [each for each, _ in server.changes] == ["load", "unload"]


def test_a_refused_load_of_the_churn_is_reported(bench, server, capsys):
    server.is_refusing = True

    bench(server.url, "--model=m", "--duration=0.3", "--churn=/models/big")

    assert bench.code == 1
    assert bench.target["churn"][0]["error"].startswith("507")
    assert "no room" in capsys.readouterr().out


def test_compare_takes_turns_and_prints_ratios(bench, server, other_server, capsys):
    args = ("--count=60", "--slices=3", f"--cpu-pid={os.getpid()}", "--connections=2")

    bench(server.url, "--model=m", "--compare", other_server.url, *args)

    one, other = bench.result["targets"]
    turns = sorted(
        (part["at"], name) for name, t in (("A", one), ("B", other)) for part in t["slices"]
    )
    assert bench.code == 0
    assert (server.seen["m"], other_server.seen["m"]) == (60, 60)
    assert [name for _, name in turns] == ["A", "B"] * 3
    for name in ("rate", "p50", "p90", "p99", "p99_9", f"cpu_seconds_per_request_{os.getpid()}"):
        spread = bench.result["ratios"][name]
        assert spread["min"] <= spread["median"] <= spread["max"]
        assert spread["slices"] == 3
    assert "ratios" in capsys.readouterr().out


@pytest.mark.slow
def test_compare_shows_the_slower_target_as_slower(bench, server, other_server):
    other_server.on_request = lambda _: other_server.stall(0.02)

    args = ("--model=m", "--compare", other_server.url, "--count=20", "--connections=1")

    def is_shown() -> bool:
        ratios = bench(server.url, *args).result["ratios"]
        return ratios["p50"]["max"] < 0.8 and ratios["rate"]["min"] > 1.2

    assert holds_once(is_shown)


def test_cpu_and_memory_of_a_process_are_told(bench, server):
    bench(server.url, "--model=m", "--count=50", f"--cpu-pid={os.getpid()}")

    (process,) = bench.target["processes"]
    assert process["pid"] == os.getpid()
    assert process["cpu_seconds"] > 0
    assert process["cpu_seconds_per_request"] == pytest.approx(process["cpu_seconds"] / 50)
    assert process["rss_before_bytes"] > 2**20


def test_the_first_line_says_how_the_load_was_made(bench, server, capsys):
    bench(server.url, "--model=m", "--count=50", "--connections=1")

    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(
        r"m, closed loop, 1 connection, 50 requests, requests of \d+ bytes as JSON", first
    )


@pytest.mark.slow
def test_an_open_loop_and_its_arrivals_are_in_that_line(bench, server, capsys):
    args = ("--rate=1000", "--arrivals=poisson", "--duration=0.2", "--connections=2")
    bench(server.url, "--models=a,b", *args)

    assert capsys.readouterr().out.startswith(
        "2 models, open loop of 1,000/s (Poisson), 2 connections, 0.2 s, requests of "
    )


def test_one_is_told_in_the_singular():
    assert [plural(count, "load") for count in (0, 1, 2, 1000)] == [
        "0 loads",
        "1 load",
        "2 loads",
        "1,000 loads",
    ]


def test_json_may_go_to_stdout_alone(server, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", server.url, "--model=m", "--count=5", "--json=-"], {}) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["targets"][0]["answered"] == 5
    assert "answered" in err
    assert list(tmp_path.iterdir()) == []


def members(value, above=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from members(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from members(inner)


def test_every_member_of_the_result_is_documented(bench, server, other_server):
    args = ("--models=m,busy", "--count=40", "--churn=/m", f"--cpu-pid={os.getpid()}", "--slices=1")
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()

    bench(server.url, "--compare", other_server.url, *args)

    measured = {name for name in members(bench.result) if not name.endswith(f"_{os.getpid()}")}
    assert {"schema", "targets", "timeline", "ratios", "churn", "median"} <= measured
    assert {name for name in measured if f"`{name}`" not in page} == set()


@pytest.mark.slow
def test_ctrl_c_shows_what_there_is(server, tmp_path):
    path, begun = tmp_path / "result.json", threading.Event()
    server.on_request = lambda number: begun.set() if number == 50 else None
    args = (server.url, "--model=m", "--duration=60", f"--json={path}", "--warmup=0")
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()

    result = json.loads(path.read_text())
    assert (process.returncode, errors) == (0, b"")
    assert result["interrupted"] is True
    assert result["targets"][0]["answered"] >= 40
    assert b"stopped early" in out
