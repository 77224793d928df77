"""Callers whose DATA comes in another order than their HEADERS, as grpc-java and grpc-go send it.

RFC 9113 section 5.1.1 orders the numbers of streams as they begin, and nothing orders their DATA.
"""

import itertools

from hpack import Decoder
from tritonclient.grpc import service_pb2 as pb

from adapter.relay import frames
from tests.cases import case
from tests.frontends.grpc.proxy_listener import (
    Wire,
    begin,
    data_frames,
    prefixed,
    request_of,
    wire_to,
)

IDS = (1, 3, 5)
# `m` goes straight to Triton; `team/a` has another name there, which the server beside us puts in
MODELS = {
    "straight": ("m", "m", "m"),
    "beside": ("team/a", "team/a", "team/a"),
    "both": ("m", "team/a", "m"),
    "unknown": ("m", "nope", "team/a"),
}
HEADS = ("head 1", "head 3", "head 5")
ORDERS = [
    *((*HEADS, *(f"data {of}" for of in order)) for order in itertools.permutations(IDS)),
    ("head 1", "head 3", "data 3", "head 5", "data 5", "data 1"),
    ("head 1", "half 1", "head 3", "head 5", "data 5", "data 3", "rest 1"),
]


def play(wire: Wire, order: tuple[str, ...], names: tuple[str, ...], pieces: int) -> None:
    for step in order:
        what, number = step.split()
        of = int(number)
        if what == "head":
            wire.send(begin(of))
            continue
        message = prefixed(request_of(names[IDS.index(of)], float(of), id=number))
        count = pieces if what == "data" else 2
        parts = data_frames(of, message, -(-len(message) // count))
        wire.send(*{"data": parts, "half": parts[:1], "rest": parts[1:]}[what])


async def answers(wire: Wire) -> dict[int, tuple[bytes, int]]:
    """Return the data and the status of all answers."""
    data, statuses = dict.fromkeys(IDS, b""), {}
    while len(statuses) < len(IDS):
        found = await wire.next()
        assert found is not None, f"only {statuses} are answered"
        kind, flags, of, payload = found
        assert kind != frames.RST_STREAM
        if kind == frames.DATA:
            data[of] += payload
        elif kind == frames.HEADERS and flags & frames.END_STREAM:
            statuses[of] = int(dict(Decoder().decode(payload, raw=True))[b"grpc-status"])
    return {of: (data[of], statuses[of]) for of in IDS}


async def test_calls_are_answered_in_any_data_order(proxy):
    for order, models, pieces in itertools.product(ORDERS, MODELS, (1, 3)):
        with case(order, models, pieces):
            async with wire_to(proxy.address) as wire:
                wire.greet()
                play(wire, order, MODELS[models], pieces)
                for of, (data, status) in (await answers(wire)).items():
                    name = MODELS[models][IDS.index(of)]
                    assert status == (5 if name == "nope" else 0)
                    if status == 0:
                        found = pb.ModelInferResponse.FromString(data[5:])
                        assert (found.model_name, found.id) == (name, str(of))
