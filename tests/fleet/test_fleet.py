"""A real Envoy in front of three real adapters, each with a real Triton, on one bucket."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count

import numpy as np
import pytest
from tritonclient import grpc

from tests.fleet.envoy import running_envoy
from tests.fleet.machines import (
    Answer,
    Machine,
    invoke,
    machines,
    put_model,
    replaced,
    room_for,
    sized,
)
from tests.journeys.endpoint.conftest import client_of
from tests.running import Client, wait_until
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

NAMES = [f"m{number}.tar.gz" for number in range(8)]


@pytest.fixture(scope="module", autouse=True)
def models(bucket, tmp_path_factory):
    for number, name in enumerate(NAMES):
        put_model(bucket, tmp_path_factory.mktemp("model"), name, number=number)


@pytest.fixture
def homes(client):
    """Where each model is."""
    answers = {name: invoke(client, name) for name in NAMES}
    assert all(each.status == 200 for each in answers.values())
    return {name: each.machine for name, each in answers.items()}


class Held:
    """Callers of models that answer when told to."""

    def __init__(self, envoy, bucket, folder):
        self._envoy, self._bucket, self._folder = envoy, bucket, folder
        self._gate = folder / "gate"
        self._pool = ThreadPoolExecutor(32)
        self._numbers = count()

    def put(self, name: str) -> str:
        wait = f"while not os.path.exists({str(self._gate)!r}): time.sleep(0.01)"
        put_model(self._bucket, self._folder, name, number=0, before=wait)
        return name

    def call(self, name: str, callers: int = 1) -> list[Future[Answer]]:
        """Return when so many more requests are at the machines."""
        before = self._in_flight()
        calls = [self._pool.submit(self._one, name) for _ in range(callers)]
        wait_until(lambda: self._in_flight() == before + callers, 30, "they are in flight")
        return calls

    def _in_flight(self) -> int:
        return self._envoy.stats("^cluster.http.upstream_rq_active$").total()

    def _one(self, name: str) -> Answer:
        with closing(self._envoy.client()) as client:
            return invoke(client, name)

    def go_on(self) -> None:
        self._gate.touch()

    def close(self) -> None:
        self.go_on()
        self._pool.shutdown()


@pytest.fixture
def held(envoy, bucket, tmp_path):
    with closing(Held(envoy, bucket, tmp_path)) as held:
        yield held


def holder(fleet: list[Machine], name: str) -> str:
    """Return the machine that has loaded a model which one call has asked for."""
    wait_until(lambda: any(name in each.models() for each in fleet), 60, f"{name} is loaded")
    [home] = [each.name for each in fleet if name in each.models()]
    return home


def the(fleet: list[Machine], name: str) -> Machine:
    (found,) = [each for each in fleet if each.name == name]
    return found


def test_each_model_is_answered_by_one_machine_alone(client, fleet):
    homes = {}
    for number, name in enumerate(NAMES):
        first = invoke(client, name)
        assert (first.status, first.value, first.attempts) == (200, number, 1), first.body
        homes[name] = first.machine
        for _ in range(3):
            again = invoke(client, name)
            assert (again.value, again.machine, again.cache) == (number, first.machine, "hit")
    assert set(homes.values()) == {each.name for each in fleet}
    for each in fleet:
        assert each.models() == {name for name, home in homes.items() if home == each.name}


def test_v2_and_grpc_meet_the_endpoints_machine(envoy, client, homes):
    """By the path and by the metadata."""
    value = grpc.InferInput("IN", [1], "FP32")
    value.set_data_from_numpy(np.zeros(1, np.float32))
    with closing(grpc.InferenceServerClient(envoy.address)) as rpc:
        assert rpc.is_server_ready()
        for number, name in enumerate(NAMES):
            reply = client.post(f"/v2/models/{name}/infer", infer_body(0.0))
            assert reply.status == 200, reply.body
            outputs = {each["name"]: each["data"] for each in reply.json()["outputs"]}
            assert (outputs["OUT"], outputs["MACHINE"]) == ([number], [homes[name]])
            found = rpc.infer(name, [value], headers={"mm-model-id": name})
            assert found.as_numpy("OUT")[0] == number
            assert found.as_numpy("MACHINE")[0].decode() == homes[name]


@pytest.mark.parametrize("size", [1, 6_291_456])
def test_another_machine_answers_for_a_full_one(envoy, client, fleet, homes, size):
    """The full one stays in the fleet."""
    name = NAMES[0]
    home = the(fleet, homes[name])
    body = json.dumps(infer_body(0.0)).encode().ljust(size)
    with filled(home):
        elsewhere = invoke(client, name, body)
        assert (elsewhere.status, elsewhere.value, elsewhere.attempts) == (200, 0, 2)
        assert elsewhere.machine != home.name
        for _ in range(5):
            assert invoke(client, name, body).machine == elsewhere.machine
        assert envoy.healthy() == {each.http for each in fleet}
    assert invoke(client, name, body).machine == home.name


@contextmanager
def filled(machine: Machine) -> Iterator[None]:
    """A model that a platform has loaded takes all of its memory."""
    whole = write_python_model(machine.roots / "whole", config=CONFIG + sized(8))
    with closing(Client(machine.http)) as own:
        for each in machine.models():
            assert own.delete(f"/models/{each}").status == 200
        assert own.load("whole", whole).status == 200
        try:
            yield
        finally:
            assert own.delete("/models/whole").status == 200


def test_model_error_is_asked_of_no_other_machine(client, bucket, fleet, folder):
    put_model(bucket, folder, "wrong.tar.gz", number=0, before="raise ValueError('no such thing')")
    answer = invoke(client, "wrong.tar.gz")
    assert (answer.status, answer.attempts) == (424, 1)
    assert b"no such thing" in answer.body
    assert sum("wrong.tar.gz" in each.models() for each in fleet) == 1


def test_killing_request_ends_one_triton_only(client, bucket, fleet, folder):
    kill = "os.kill(os.getppid(), signal.SIGKILL)"
    put_model(bucket, folder, "killer.tar.gz", number=0, before=kill)
    before = [each.triton() for each in fleet]
    answer = invoke(client, "killer.tar.gz")
    assert (answer.status, answer.attempts) == (424, 1)
    (victim,) = replaced(fleet, before)
    wait_until(victim.is_ready, 60, f"{victim.name} is ready again")


def test_dead_machine_costs_only_what_was_in_flight(envoy, client, fleet, homes, held):
    """The models of others stay where they are."""
    busy = []
    for number in count():
        (call,) = held.call(name := held.put(f"held-{number}.tar.gz"))
        busy.append((holder(fleet, name), call))
        if {home for home, _ in busy} == {each.name for each in fleet}:
            break
    victim = fleet[0]
    victim.kill()
    answers = {name: invoke(client, name) for name in NAMES}
    assert {each.status for each in answers.values()} == {200}
    stayed = [each for name, each in answers.items() if each.machine == homes[name]]
    assert stayed
    # on disk where the victim's models have taken the memory, but never fetched again
    assert {each.cache for each in stayed} <= {"hit", "disk"}
    held.go_on()
    statuses = {(home == victim.name, call.result().status) for home, call in busy}
    assert statuses == {(True, 503), (False, 200)}
    victim.start()
    envoy.wait_for(*fleet)
    back = {name: invoke(client, name) for name in NAMES}
    assert {name: each.machine for name, each in back.items()} == homes
    assert {each.cache for name, each in back.items() if homes[name] == victim.name} == {"disk"}


def test_a_machine_that_is_ended_loses_no_request(envoy, fleet, homes):
    stopping, known = the(fleet, homes[NAMES[0]]), len(envoy.failures())
    statuses: Counter[int] = Counter()
    with ThreadPoolExecutor(8) as pool:
        go_on = [True]

        def ask(caller: int) -> None:
            with closing(envoy.client()) as own:
                for number in count(caller):
                    statuses[invoke(own, NAMES[number % 8]).status] += 1
                    if not go_on[0]:
                        return

        calls = [pool.submit(ask, caller) for caller in range(8)]
        stopping.stop()
        stopping.start()
        envoy.wait_for(*fleet)
        go_on[0] = False
        for call in calls:
            call.result()
    assert set(statuses) == {200}, envoy.failures()[known:]


def test_hot_model_is_answered_by_two_machines(fleet, held):
    held.put("hot.tar.gz")
    held.call("hot.tar.gz")
    calls = held.call("hot.tar.gz", 19)
    held.go_on()
    answers = [each.result() for each in calls]
    assert {each.status for each in answers} == {200}
    assert len({each.machine for each in answers}) == 2


def test_another_envoy_picks_the_same_machine(fleet, homes):
    with running_envoy(fleet) as other, closing(other.client()) as client:
        answers = {name: invoke(client, name) for name in NAMES}
    assert {name: (each.machine, each.cache) for name, each in answers.items()} == {
        name: (home, "hit") for name, home in homes.items()
    }


def test_a_name_is_asked_for_its_addresses(fleet):
    (only, *_) = fleet
    ports = ":".join(str(port) for port in only.ports)
    with (
        running_envoy([only], f"--dns=localhost:{ports}", are_listed=False) as envoy,
        closing(envoy.client()) as client,
    ):
        assert invoke(client, NAMES[0]).machine == only.name


def test_signature_survives_envoy(bucket, folder, client):
    assert invoke(client, NAMES[0]).status == 200  # nobody is asked who calls
    (secret := folder / "secret").write_text("secret")  # that of `client_of`
    keys = f"--endpoint-keys=AKIDEXAMPLE file:{secret} m*"
    with (
        machines(1, bucket, folder, *room_for(8), keys) as fleet,
        running_envoy(fleet) as envoy,
        closing(client_of(envoy.address)) as runtime,
        closing(envoy.client()) as other,
    ):
        body = json.dumps(infer_body(1.0))
        found = runtime.invoke_endpoint(EndpointName="any", TargetModel=NAMES[1], Body=body)
        assert json.load(found["Body"])["outputs"][0]["data"] == [2.0]
        assert invoke(other, NAMES[1]).status == 403
