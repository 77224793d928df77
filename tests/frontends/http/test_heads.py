"""Heads of requests: which inferences are planned, and what Triton is told of each."""

import pytest

from adapter.frontends.access import SitePolicy
from adapter.frontends.http.contracts import ContainerContracts
from adapter.frontends.http.plans import Heads, Plan
from adapter.telemetry.traffic import Traffic
from tests.cases import rows
from tests.fakes.control import ControlOnFakes
from tests.frontends.http.listener import ANYWHERE, PLANNED, head, request

LENGTH = "Content-Length: 2"
V2 = "/v2/models/m/infer"


def heads(host: str = "triton:8000", sites: SitePolicy = ANYWHERE) -> Heads:
    fakes = ControlOnFakes()
    contracts = ContainerContracts(fakes.control, fakes.control_state.triton)
    made = Heads(Traffic().served, contracts, default_model=None, max_body_bytes=1000, sites=sites)
    made.host = host
    return made


def plan_of(raw: bytes, known: Heads | None = None) -> Plan | None:
    return (known or heads()).read(raw)[0].plan


def test_few_and_short_heads_are_kept():
    known = heads()
    for number in range(1000):
        raw = head(PLANNED, f"X: {number}")
        assert known.read(raw)[0] is known.read(raw)[0] is known.known[raw]
        assert len(known.known) <= 256
    known = heads()
    known.read(head(PLANNED, f"X: {'y' * 3000}"))
    assert not known.known


def test_nothing_is_planned_before_there_is_a_triton():
    """Nor is the head kept, whose plan is to come."""
    known = heads(host="")
    raw = head(PLANNED, LENGTH)
    assert plan_of(raw, known) is None
    known.host = "triton:8000"
    assert plan_of(raw, known) is not None


@rows("name", ["X-A", "traceparent"])
def test_header_unread_by_triton_is_not_planned(name):
    known = heads()
    assert plan_of(head(V2, LENGTH, f"{name}: {'a' * 8000}"), known) is not None
    raw = head(V2, LENGTH, f"{name}: {'a' * 8200}")
    found, lines = known.read(raw)
    assert (found.plan, lines) == (None, b"")


@rows("path", [PLANNED, V2, "/v2/models/m/versions/12/infer"])
@rows("field", ["Connection: keep-alive", "Connection: close", "X: y", "TE: trailers"])
def test_inference_is_planned_whatever_its_head(path, field):
    found, _ = heads().read(head(path, LENGTH, field))
    assert found.length == 2
    assert found.plan is not None
    assert found.plan.model_id == "m"


@rows(
    "raw",
    [
        head(PLANNED, "Content-Length: 1001"),
        head(PLANNED, LENGTH, "Content-Encoding: br"),
        head(PLANNED, LENGTH, "Content-Type: a", "Content-Type: b"),
        head(PLANNED, LENGTH, "Origin: http://localhost"),
        head(PLANNED, LENGTH, "traceparent: 0", "Traceparent: 1"),
        head(PLANNED, LENGTH, method="PUT"),
        head("/models//invoke", LENGTH),
        head(f"/models/{'m' * 1025}/invoke", LENGTH),
        head("/v2/models/m/versions/x/infer", LENGTH),
        head("/v2/models/infer", LENGTH),
        head("/v2/models/m/generate", LENGTH),
        head("/v2/models/m/generate_stream", LENGTH),
        head("/v2/models/m/ready", LENGTH),
        head("/invocations", LENGTH),
        head(V2, LENGTH, "Inference-Header-Content-Length: x"),
        head(PLANNED, LENGTH, "Content-Type: application/vnd.sagemaker-triton.binary+json"),
    ],
)
def test_handler_answers_what_has_no_plan(raw):
    assert plan_of(raw) is None


ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


@pytest.mark.parametrize(
    ("path", "fields", "onward"),
    [
        (PLANNED, ("Accept-Encoding: gzip", "Cookie: a"), b"Accept-Encoding: gzip"),
        (PLANNED, (f"{ATTRIBUTES}: a=b", "Cookie: a"), f"{ATTRIBUTES}: a=b".encode()),
        (V2, ("X-A: 1", "Content-Type: text/html", "Connection: keep-alive"), b"X-A: 1"),
    ],
)
def test_triton_is_told_the_fields_of_the_contract(path, fields, onward):
    plan = plan_of(head(path, LENGTH, *fields))
    assert plan is not None
    lines = plan.upstream_head.split(b"\r\n")
    assert lines[:3] == [b"POST /v2/models/m/infer HTTP/1.1", b"Host: triton:8000", onward]
    assert lines[3:] == [b"Content-Type: application/json", b"Content-Length: 2", b"", b""]


TRACE, KEY = "traceparent: 00-%d-01", "Authorization: %d"


@pytest.mark.parametrize("path", [PLANNED, V2])
@pytest.mark.parametrize(("line", "is_told"), [(TRACE, True), (KEY, False)])
def test_lines_that_differ_go_with_their_own_request(path, line, is_told):
    known = heads()
    same = plan_of(head(path, LENGTH), known)
    for number in (1, 2):
        own = line % number
        found, lines = known.read(head(path, LENGTH, own))
        assert found.plan is same is not None
        assert lines == (f"{own}\r\n".encode() if is_told else b"")


async def test_one_head_with_many_bodies_asks_for_each(listener, caller):
    bodies = [b"[%d]" % number for number in range(10, 30)]
    for body in bodies:
        assert (await caller.ask(request(PLANNED, body))).status == 200
    assert listener.whole_requests() == bodies
