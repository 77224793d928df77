"""What callers and models of the endpoint must not be able to do to each other."""

import gzip
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.cases import rows
from tests.journeys.endpoint.folder_store import Caller, Store
from tests.processes import tritonserver
from tests.running import COMPLETE, Reply, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

_BODY = json.dumps(infer_body(0.0)).encode()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """`m.tar.gz` adds 1, `other/m.tar.gz` 2; `second` has a model of its own."""
    store = Store(tmp_path_factory.mktemp("store"))
    store.put("m.tar.gz", 1)
    store.put("other/m.tar.gz", 2)
    store.put("second/m.tar.gz", 3)
    return store


@pytest.fixture(scope="module")
def caller(store, tmp_path_factory) -> Iterator[Caller]:
    place = tmp_path_factory.mktemp("place")
    second = Store(place / "second")
    second.path.mkdir()
    second.put("m.tar.gz", 4)
    flags = (
        f"--model-store={store.path}",
        f"--endpoints=second={second.path}",
        f"--cache-dir={place}/cache",
        f"--model-roots={place}/roots",
        "--on-demand",
    )
    with (
        embedded_adapter(*flags, COMPLETE) as adapter,
        closing(Caller(adapter)) as caller,
    ):
        yield caller


def sent(caller: Caller, body: bytes) -> Reply:
    headers = {"X-Amzn-SageMaker-Target-Model": "m.tar.gz", "Content-Encoding": "gzip"}
    return caller.http.post("/endpoints/any/invocations", gzip.compress(body), headers)


@rows(("shape", "blanks"), [(b"4611686018427387904", 0), (b"1", 300_000_000)])
def test_packed_garbage_is_the_callers_error(caller, shape, blanks):
    """A shape of too many values, and too much when it is unpacked."""
    body = _BODY.replace(b'"shape": [1]', b'"shape": [%b]' % shape) + b" " * blanks
    before = tritonserver(caller.adapter)
    assert sent(caller, _BODY).data == [1.0]
    reply = sent(caller, body)
    assert (reply.status, reply.json().get("OriginalStatusCode")) in {(424, 400), (400, None)}
    assert tritonserver(caller.adapter) == before
    assert caller.invoke("m.tar.gz")[0] == 1


def test_stores_key_names_no_model_of_another(caller):
    headers = {"X-Amzn-SageMaker-Target-Model": "m.tar.gz"}
    reply = caller.http.post("/endpoints/second/invocations", infer_body(0.0), headers)
    assert reply.data == [4.0]
    status, body = caller.refused("second/m.tar.gz")
    assert status == 400
    assert "'second' is the name of an endpoint" in body["Message"]
    assert caller.invoke("other/m.tar.gz")[0] == 2


def test_a_name_of_v2_is_no_key(caller):
    """V2 finds `other/m.tar.gz` by the name `other/m` as well."""
    assert caller.http.post("/v2/models/other%2Fm/infer", infer_body(0.0)).status == 200
    status, body = caller.refused("other/m")
    assert (status, body["Message"].count("other/m")) == (400, 2), body
