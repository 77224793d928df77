"""An unexpected failure at the listeners for operators."""

from collections.abc import Mapping

import pytest
from aiohttp import ClientError
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Request, Response, StreamResponse

from adapter.frontends.access import SitePolicy
from adapter.frontends.admin import Handler, application
from adapter.settings import parse_address
from tests.control import admin
from tests.fakes.house import House


class Faulty:
    def handlers(self) -> Mapping[str, Handler]:
        return {"readyz": self._fail, "resident": self._fail_amid_the_answer}

    async def _fail(self, _: Request) -> Response:
        raise ZeroDivisionError

    async def _fail_amid_the_answer(self, request: Request) -> StreamResponse:
        response = StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        raise ZeroDivisionError


@pytest.fixture
async def client():
    sites = SitePolicy(parse_address("127.0.0.1:0"), ())
    async with TestClient(TestServer(application(sites, Faulty()))) as client:
        yield client


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, object]]:
    return [
        (each.path, each.exc_info and each.exc_info[0])
        for each in caplog.records
        if each.message == "request.failed"
    ]


async def test_a_bug_is_answered_as_json_and_logged_with_its_traceback(client, caplog):
    reply = await client.get("/readyz")
    assert reply.status == 500
    assert await reply.json() == {"error": "internal error; see the log"}
    assert "Server" not in reply.headers
    assert logged(caplog) == [("/readyz", ZeroDivisionError)]


async def test_a_bug_amid_an_answer_breaks_it_off(client, caplog):
    with pytest.raises(ClientError):
        await (await client.get("/resident")).read()
    assert logged(caplog) == [("/resident", ZeroDivisionError)]


async def test_a_bug_in_the_state_is_answered_as_json(monkeypatch):
    monkeypatch.delattr(admin, "WELL")
    house = await House(0).open()
    async with admin.admin_of(house) as client:
        reply = await client.get("/debug/state")
        assert (reply.status, reply.content_type) == (500, "application/json")
    await house.close()
