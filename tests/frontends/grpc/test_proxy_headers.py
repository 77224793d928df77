"""Headers that gRPC's own parsers do not take are their caller's fault, and so are told."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hpack import Decoder, Encoder

from adapter.relay import frames
from adapter.relay.frames import Code
from adapter.relay.headers import encoded
from tests.cases import case, rows
from tests.frontends.grpc.proxy_listener import (
    INFER,
    STREAM,
    begin,
    complete,
    echo,
    frame,
    head_of,
    prefixed,
    proxy_before,
    request_of,
    status,
    wire_to,
)
from tests.grpc_calls import SERVICE

ODD = {
    "binary that is not base64": (b"trace-bin", b"!!!"),
    "binary of an odd length": (b"trace-bin", b"A"),
    "a model's name that is not base64": (b"mm-model-id-bin", b"%%"),
    "binary in two parts": (b"trace-bin", b"AA==,AA=="),
    "binary that is padded amid": (b"trace-bin", b"AA=A"),
    "binary with bits too many": (b"trace-bin", b"AB=="),
    "attempts below nothing": (b"grpc-previous-rpc-attempts", b"-1"),
    "attempts that are no number": (b"grpc-previous-rpc-attempts", b"many"),
    "a limit of time without a unit": (b"grpc-timeout", b"10"),
    "a limit of time that is no number": (b"grpc-timeout", b"soonS"),
    "a limit of time below nothing": (b"grpc-timeout", b"-1S"),
    "a limit of time in another unit": (b"grpc-timeout", b"1D"),
    "no limit of time": (b"grpc-timeout", b""),
    "a name with a slash": (b"a/b", b"x"),
    "a name with a bracket": (b"a[b]", b"x"),
    "another encoding that nobody knows": (b"grpc-internal-encoding-request", b"snappy"),
    "a status in a request": (b"grpc-status", b"no"),
    "a pushback that is no number": (b"grpc-retry-pushback-ms", b"soon"),
    "a load balancer's cost": (b"lb-cost-bin", b"AA"),
}
LIVE, SHORT = f"/{SERVICE}/ServerLive", 200

UNKNOWN_ENCODING = (b"grpc-encoding", b"snappy")


@pytest.mark.parametrize("path", [INFER, STREAM])
async def test_unknown_encoding_is_told_the_known_ones(proxy, wire, path):
    """As the compression of gRPC has it, so that the caller may choose another one."""
    _, block = await wire.ask(1, head_of(path, UNKNOWN_ENCODING))
    assert status(block) == "UNIMPLEMENTED"
    trailers = dict(Decoder().decode(block, raw=True))
    assert trailers[b"grpc-accept-encoding"] == b"identity,deflate,gzip"
    assert b"'snappy'" in trailers[b"grpc-message"]
    assert b"identity, deflate and gzip" in trailers[b"grpc-message"]
    if path == INFER:
        assert proxy.counted("UNIMPLEMENTED") == 1


@pytest.mark.parametrize("path", [INFER, STREAM])
async def test_odd_headers_fail_their_call_alone(proxy, wire, path):
    for number, (name, odd) in enumerate(ODD.items()):
        with case(name):
            _, trailers = await wire.ask(4 * number + 1, head_of(path, odd))
            assert status(trailers) == "INVALID_ARGUMENT"
            assert b"InvalidRequest: " in trailers
            assert odd[0] in trailers
            data, _ = await wire.ask(4 * number + 3, head_of(INFER))
            assert len(data) > 5
            assert proxy.in_flight("m") == 0


@pytest.mark.parametrize("path", [INFER, STREAM, LIVE])
async def test_a_call_without_te_trailers_is_told_so(proxy, wire, path):
    """The C core of gRPC resets the stream without a word, and never begins with the call."""
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode())]
    head += [(b":authority", b"x"), (b"content-type", b"application/grpc")]
    _, trailers = await wire.ask(1, b"\x20" + encoded(head))
    assert status(trailers) == "INVALID_ARGUMENT"
    assert b"te must be trailers" in trailers


@pytest.mark.parametrize("path", [INFER, STREAM, LIVE])
async def test_unknown_compressed_flag_is_refused(proxy, wire, path):
    """The C core of gRPC hands an empty message on."""
    message = b"\2" + prefixed(request_of())[1:]
    wire.send(begin(1, path))
    wire.send(frame(frames.DATA, frames.END_STREAM, 1, message))
    data, trailers = await wire.answer(1)
    assert (data, status(trailers)) == (b"", "UNIMPLEMENTED")
    assert b"compressed flag 2" in trailers
    assert len((await wire.ask(3, head_of(INFER)))[0]) > 5
    assert proxy.in_flight("m") == 0


async def test_long_header_name_is_cut_in_the_error(proxy, wire):
    for number, name in enumerate((b"a" * 9000 + b"-bin", b"a/" * 4500)):
        _, trailers = await wire.ask(2 * number + 1, head_of(INFER, (name, b"!!")))
        assert status(trailers) == "INVALID_ARGUMENT"
        assert len(trailers) < SHORT


FINE = {
    "binary with padding": (b"trace-bin", b"AA=="),
    "binary without padding": (b"trace-bin", b"AAA"),
    "no binary at all": (b"trace-bin", b""),
    "attempts": (b"grpc-previous-rpc-attempts", b"2"),
    "an encoding that the caller takes": (b"grpc-accept-encoding", b"identity,gzip"),
    "a long limit of time": (b"grpc-timeout", b"99999999999H"),
    "a limit of time with a space": (b"grpc-timeout", b"9 S"),
    "a value beyond ASCII": (b"x", "\u00e4".encode()),
    "a value with a tab": (b"x", b"a\tb"),
    "a status": (b"grpc-status", b"3"),
    "every sign of a name": (b"a-z_0.9", b"x"),
    "every sign of a value": (b"x", bytes(range(0x20, 0x7F)).strip()),
    "a trace": (b"grpc-trace-bin", b"AAAA"),
    "a header of gRPC that nobody knows": (b"grpc-of-tomorrow", b"x"),
}


async def test_unusual_headers_pass(proxy, wire):
    for number, (name, more) in enumerate(FINE.items()):
        with case(name):
            data, _ = await wire.ask(2 * number + 1, head_of(INFER, more))
            assert len(data) > 5


class _Echoing(grpc.GenericRpcHandler):
    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda message, _: message)


@pytest.fixture(scope="module")
def grpc_itself():
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Echoing()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


async def test_grpc_itself_takes_the_same_headers(grpc_itself):
    """What `routing.py` says of them is what grpc's own server does, which is Triton's too."""
    for more in (*ODD.values(), *FINE.values(), UNKNOWN_ENCODING):
        async with wire_to(grpc_itself) as wire:
            with case(more):
                wire.greet()
                data, trailers = await wire.ask(1, head_of(INFER, more))
                assert status(trailers) == ("OK" if more in FINE.values() else "INTERNAL")
                assert bool(data) is (more in FINE.values())


TOO_LARGE = {
    "129 headers": (129, 1),
    "33 KiB in a few": (3, 11 * 2**10),
}


@pytest.mark.parametrize("has_table", [True, False], ids=["a table", "no table"])
@pytest.mark.parametrize("is_grpc", [True, False], ids=["gRPC", "not gRPC"])
@pytest.mark.parametrize(("count", "size"), TOO_LARGE.values(), ids=TOO_LARGE)
async def test_oversized_headers_fail_their_call_alone(proxy, count, size, is_grpc, has_table):
    """As grpc answers them, others as RFC 6585 has it; what they put into the table stays there."""
    async with wire_to(proxy.address) as wire:
        encoder = Encoder()
        usual = list(Decoder().decode(head_of()[1:], raw=True))
        if not is_grpc:
            usual[0] = (b":method", b"GET")
        more = [(f"x-{i}".encode(), b"v" * size) for i in range(count)] + [(b"last", b"kept")]
        if has_table:
            wire.send(frames.PREFACE, frames.settings({}))
        else:
            wire.greet()
            encoder.header_table_size = 0
        block = encoder.encode(usual + more, huffman=False)
        wire.send(frames.header_block(1, block, end=not is_grpc))
        while (found := await wire.next())[0] != frames.HEADERS:
            pass
        told = dict(Decoder().decode(found[3], raw=True))
        if is_grpc:
            assert (told[b":status"], found[1] & frames.END_STREAM) == (b"200", frames.END_STREAM)
            assert status(found[3]) == "RESOURCE_EXHAUSTED"
            assert proxy.counted("RESOURCE_EXHAUSTED") == 1
        else:
            assert told[b":status"] == b"431"
        usual[0] = (b":method", b"POST")
        block = encoder.encode([*usual, (b"last", b"kept")], huffman=False)
        assert (b"kept" in block) is not has_table  # it is sent by its place in the table
        data, _ = await wire.ask(3, block)
        assert len(data) > 5


async def test_headers_over_four_limits_end_the_connection(proxy):
    async with wire_to(proxy.address) as wire:
        wire.send(frames.PREFACE, frames.settings({}))
        wire.send(frame(frames.HEADERS, frames.END_HEADERS, 1, head_of()[1:] + b"\x82" * 600))
        assert await wire.ended_with() == Code.ENHANCE_YOUR_CALM


async def test_128_headers_pass(proxy, wire):
    more = [(f"x-{i}".encode(), b"v" * 100) for i in range(122)]
    data, _ = await wire.ask(1, head_of(INFER, *more))
    assert len(data) > 5


async def test_expired_call_is_late_on_arrival(proxy, wire):
    _, trailers = await wire.ask(1, head_of(INFER, (b"grpc-timeout", b"0m")))
    assert status(trailers) == "DEADLINE_EXCEEDED"
    assert proxy.methods == set()


@rows(
    ("kind", "http_status"),
    [
        (b"application/grpc-web", b"415"),
        (b"application/grpcx", b"415"),
        (b"application/grpc+proto", b"200"),
        (b"application/grpc; x=y", b"200"),
    ],
)
async def test_only_the_media_types_of_grpc_are_grpc(kind, http_status):
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", INFER.encode())]
    headers += [(b":authority", b"x"), (b"content-type", kind), (b"te", b"trailers")]
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet()
        wire.send(frames.header_block(1, b"\x20" + encoded(headers), end=False))
        wire.send(complete(1))
        while (found := await wire.next())[0] != frames.HEADERS:
            pass
        assert (b":status", http_status) in Decoder().decode(found[3], raw=True)
