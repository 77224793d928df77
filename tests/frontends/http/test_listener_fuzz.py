"""Bytes that nobody has thought of. For minutes: tests/nightly/test_properties.py.

Whatever comes, each connection is answered or closed, the next good request is served, and Triton
sees nothing that was not one whole valid request.
"""

import asyncio
import logging
import re

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapter.frontends.bodies import Limits
from tests.frontends.http.listener import HANDLED, PLANNED, opened, request

EXAMPLES = 40
# no connection ends by one of these: what is to be answered or closed is so at once
PATIENT = Limits(idle=60, head=60, body=60, answer=60, gone=60, linger=60)
SECONDS = 30
HEAD = re.compile(rb"POST /v2/models/m/infer HTTP/1\.1\r\n([!-9;-~]+: [\t -~\x80-\xff]*\r\n)+\r\n")

PATHS = st.sampled_from(
    [PLANNED, HANDLED, "/v2/models/m/infer", "/models/x/invoke", "/models", "*", "/"]
)
FIELDS = st.lists(
    st.sampled_from(
        [
            *("Content-Length: 2", "Content-Length: 0", "Content-Length: 3", "Content-Length: -1"),
            *(
                "Transfer-Encoding: chunked",
                "Transfer-Encoding: gzip",
                "Transfer-Encoding : chunked",
            ),
            *("Connection: close", "Connection: keep-alive", "Connection: Content-Length"),
            *("Expect: 100-continue", "Host: x", "Host: y", "X: a\r\n b", "X: a\nb", "X: a\rb"),
            *(
                "Upgrade: h2c",
                "Connection: Upgrade",
                "Content-Type: a/b",
                "X-\u00fc: y",
                "Content-Length: 2 ",
            ),
        ]
    ),
    max_size=4,
)
BODIES = st.sampled_from(
    [
        b"",
        b"{}",
        b"{}}",
        b"2\r\n{}\r\n0\r\n\r\n",
        b"0\r\n\r\n",
        b"2\r\n{}\r\n",
        b"0\r\nx: y\r\n\r\n",
        b"zz\r\n",
    ]
)
VERSIONS = st.sampled_from(["1.1", "1.1", "1.1", "1.0", "2.0"])
METHODS = st.sampled_from(["POST", "POST", "POST", "GET", "HEAD", "DELETE", "CONNECT", "post"])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Nearly a request."""
    line = f"{draw(METHODS)} {draw(PATHS)} HTTP/{draw(VERSIONS)}"
    lines = [line, *(["Host: x"] if draw(st.booleans()) else []), *draw(FIELDS)]
    return "\r\n".join([*lines, "\r\n"]).encode() + draw(BODIES)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Requests, near requests and noise, some of it spoilt, cut anywhere."""
    good = st.builds(request, PATHS, st.just(b"{}"))
    parts = draw(st.lists(st.one_of(good, good, messages(), st.binary(max_size=20)), max_size=5))
    data = bytearray(b"".join(parts))
    for _ in range(draw(st.integers(0, 2)) if data else 0):
        at = draw(st.integers(0, len(data) - 1))
        data[at] = draw(st.sampled_from(b"\r\n\0 \t:,;aZ0\xff"))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    return [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def talk(pieces: list[bytes], *, is_reset: bool) -> None:
    async with opened(limits=PATIENT) as listener:
        caller = await listener.connect()
        try:
            for piece in pieces:
                await caller.send(piece)
                await asyncio.sleep(0)
            if is_reset:
                caller.reset()
            else:
                caller.writer.write_eof()
                async with asyncio.timeout(SECONDS):
                    answers = await caller.rest()
                assert not answers or answers.startswith(b"HTTP/1.")
        except ConnectionError:
            pass
        caller.writer.close()
        async with asyncio.timeout(SECONDS):
            await listener.until_lost()
        for asked in listener.upstream.requests:
            assert HEAD.fullmatch(asked.head.replace(b"/versions/1", b"")), asked.head
            assert asked.head.lower().count(b"\r\nhost:") == 1
            lengths = asked.head.lower().count(b"\r\ncontent-length:")
            assert lengths + asked.head.count(b"\r\nTransfer-Encoding: chunked\r\n") == 1
        other = await listener.connect()
        for path in (PLANNED, HANDLED):
            assert (await other.ask(request(path))).status == 200


_PLAIN = b"POST /app HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(pieces=streams(), is_reset=st.booleans())
@example(pieces=[_PLAIN[:-2], _PLAIN[-2:] + _PLAIN], is_reset=True)
def test_whatever_comes_is_answered_or_closed_and_nothing_of_it_stays(pieces, is_reset):
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append
    logging.getLogger().addHandler(handler)
    try:
        asyncio.run(talk(pieces, is_reset=is_reset))
    finally:
        logging.getLogger().removeHandler(handler)
    assert [record for record in seen if record.levelno >= logging.ERROR] == []
