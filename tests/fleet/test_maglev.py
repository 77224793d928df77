"""The table of scripts/simulation and a real Envoy choose the same machines."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue

import pytest

from scripts.simulation.fleet import BALANCE_FACTOR, TABLE_SIZE, chosen
from scripts.simulation.maglev import BoundedTable, Table, hash_of
from tests.fleet.envoy import RunningEnvoy
from tests.running import Client

KEYS = [f"team-{number % 7}/model-{number}.tar.gz" for number in range(1000)]
HEADER = "X-Amzn-SageMaker-Target-Model"


class Stub(ThreadingHTTPServer):
    """A machine that answers with its name, but says before that somebody has asked it. It answers
    503 to health checks while it is not ready, and to calls when it is full.
    """

    request_queue_size = 256

    def __init__(self, name: str, asked: SimpleQueue[str], go_on: threading.Event) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.asked, self.go_on = name, asked, go_on
        self.is_up, self.is_full = True, False
        self.http = f"127.0.0.1:{self.server_port}"

    @property
    def argument(self) -> str:
        return f"{self.name}=127.0.0.1:{':'.join([str(self.server_port)] * 3)}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body go together
    server: Stub

    def do_GET(self) -> None:
        self._answer(200 if self.server.is_up else 503)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.put(self.server.name)
        self.server.go_on.wait()
        self._answer(503 if self.server.is_full else 200)

    def _answer(self, status: int) -> None:
        body = self.server.name.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("X-Triton-Adapter-Not-Started", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class ByAddress(RunningEnvoy):
    """An Envoy that does not know the machines' names, as with --dns."""

    def start(self) -> None:
        lines = self._file.read_text().splitlines(keepends=True)
        self._file.write_text("".join(line for line in lines if "hash_key" not in line))
        super().start()


class Fleet:
    """`asked`: the names of the machines that calls came to, in order. They are answered once
    `go_on` is set.
    """

    def __init__(self, stubs: list[Stub], envoy: RunningEnvoy) -> None:
        self.stubs, self.envoy = stubs, envoy
        self.asked, self.go_on = stubs[0].asked, stubs[0].go_on
        self.names = [stub.name for stub in stubs]

    def ask(self, key: str) -> str:
        with closing(self.envoy.client()) as client:
            return asked(client, key)

    def ask_all(self, keys: list[str]) -> list[str]:
        with closing(self.envoy.client()) as client:
            return [asked(client, key) for key in keys]

    def healthy(self) -> None:
        self.envoy.wait_for(*(stub for stub in self.stubs if stub.is_up))


def asked(client: Client, key: str) -> str:
    reply = client.post("/endpoints/any/invocations", b"{}", {HEADER: key})
    assert reply.status in {200, 503}, reply
    return reply.body.decode()


@contextmanager
def fleet(
    folder: Path, count: int, *flags: str, start: type[RunningEnvoy] = RunningEnvoy
) -> Iterator[Fleet]:
    with ExitStack() as opened:
        asked: SimpleQueue[str] = SimpleQueue()
        go_on = threading.Event()
        go_on.set()
        stubs = [Stub(f"machine-{number}", asked, go_on) for number in range(count)]
        for stub in stubs:
            serving = threading.Thread(target=stub.serve_forever, args=(0.05,))
            serving.start()
            opened.callback(serving.join)
            opened.callback(stub.server_close)
            opened.callback(stub.shutdown)
        envoy = start(stubs, folder, *flags)
        opened.callback(envoy.stop)
        opened.callback(go_on.set)
        made = Fleet(stubs, envoy)
        made.healthy()
        yield made


def homes(names: list[str], keys: list[str]) -> list[str]:
    table = Table(names, TABLE_SIZE)
    return [names[table.index_of(hash_of(key))] for key in keys]


@pytest.mark.parametrize("count", [3, 5, 7])
def test_for_1000_keys_the_table_leads_where_a_real_envoy_does(tmp_path, count):
    with fleet(tmp_path, count) as real:
        theirs = real.ask_all(KEYS)
        stats = real.envoy.stats("^cluster.http.maglev_lb.")
    assert homes(real.names, KEYS) == theirs
    assert len(Counter(theirs)) == count
    prefix, entries = "cluster.http.maglev_lb", Table(real.names, TABLE_SIZE).entries()
    assert stats[f"{prefix}.min_entries_per_host"] == min(entries)
    assert stats[f"{prefix}.max_entries_per_host"] == max(entries)
    assert sum(entries) == TABLE_SIZE


def test_machines_without_names_are_in_the_table_by_their_addresses(tmp_path):
    with fleet(tmp_path, 4, start=ByAddress) as real:
        theirs = real.ask_all(KEYS)
    addresses = [stub.http for stub in real.stubs]
    name_of = dict(zip(addresses, real.names, strict=True))
    assert [name_of[address] for address in homes(addresses, KEYS)] == theirs


def test_without_a_machine_the_table_of_the_others_leads_where_a_real_envoy_does(tmp_path):
    with fleet(tmp_path, 4) as real:
        real.stubs[1].is_up = False
        real.healthy()
        theirs = real.ask_all(KEYS[:300])
    left = [stub.name for stub in real.stubs if stub.is_up]
    assert homes(left, KEYS[:300]) == theirs


@pytest.mark.parametrize("factor", [101, BALANCE_FACTOR, 300])
def test_an_overloaded_machine_is_passed_over_for_the_one_that_a_real_envoy_takes(tmp_path, factor):
    """Three of four calls are of one hot model; none is answered before the last has come."""
    dice = random.Random(factor)
    keys = [KEYS[0] if dice.random() < 0.75 else dice.choice(KEYS) for _ in range(120)]
    flags = () if factor == BALANCE_FACTOR else (f"--balance={factor}",)
    in_flight, ours, theirs = [0] * 5, [], []
    with fleet(tmp_path, 5, *flags) as real, ThreadPoolExecutor(len(keys)) as callers:
        real.go_on.clear()
        table = BoundedTable(Table(real.names, TABLE_SIZE), factor)
        for key in keys:
            at = table.index_of(hash_of(key), in_flight, sum(in_flight))
            in_flight[at] += 1
            ours.append(real.names[at])
            callers.submit(real.ask, key)
            theirs.append(real.asked.get(timeout=30))
        real.go_on.set()
    assert ours == theirs
    [home] = homes(real.names, KEYS[:1])
    assert any(key == KEYS[0] and at != home for key, at in zip(keys, ours, strict=True))


def test_a_call_that_full_machines_did_not_begin_goes_where_a_real_envoy_sends_it(tmp_path):
    with fleet(tmp_path, 5) as real:
        for stub in real.stubs[:3]:
            stub.is_full = True
        real.ask_all(KEYS[:100])
        theirs = [real.asked.get_nowait() for _ in range(real.asked.qsize())]
    table, ours = BoundedTable(Table(real.names, TABLE_SIZE), BALANCE_FACTOR), []
    for key in KEYS[:100]:
        tried: list[int] = []
        while len(tried) < 3 and (not tried or real.stubs[tried[-1]].is_full):
            tried.append(chosen(table, hash_of(key), [0] * 5, 0, tried))
        ours += [real.names[at] for at in tried]
    assert ours == theirs
    assert len(ours) > 125
