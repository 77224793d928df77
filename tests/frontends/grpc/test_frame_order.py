"""Callers whose DATA comes in another order than their HEADERS, as grpc-java and grpc-go send it.

RFC 9113 section 5.1.1 orders the numbers of streams as they begin, and nothing orders their DATA.
"""

import itertools

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.cases import case
from tests.frontends.grpc.h2_client import H2Client, cut, h2_to
from tests.frontends.grpc.proxy_listener import prefixed, request_of

IDS = (1, 3, 5)
NOT_FOUND = 5
# `m` goes straight to Triton; `team/a` has another name there, which the server beside us puts in
MODELS = {
    "straight": ("m", "m", "m"),
    "beside": ("team/a", "team/a", "team/a"),
    "both": ("m", "team/a", "m"),
    "unknown": ("m", "nope", "team/a"),
}
HEADS_FIRST = "all HEADERS, then DATA"
ORDERS = [
    *(pytest.param(HEADS_FIRST, order, id=f"{order}") for order in itertools.permutations(IDS)),
    pytest.param((1, 3, "data 3", 5, "data 5", "data 1"), None, id="HEADERS amid DATA"),
    pytest.param((1, "half 1", 3, 5, "data 5", "data 3", "rest 1"), None, id="DATA in halves"),
]


def play(client: H2Client, steps: str | tuple, order: tuple | None, names, pieces: int) -> None:
    messages = {
        of: request_of(name, float(of), id=str(of)) for of, name in zip(IDS, names, strict=True)
    }
    if order is not None:
        steps = (*IDS, *(f"data {of}" for of in order))
    for step in steps:
        if isinstance(step, int):
            client.head(step)
            continue
        what, number = step.split()
        of = int(number)
        halves = cut(prefixed(messages[of]), 2)
        if what == "data":
            client.data(of, messages[of], pieces=pieces)
        elif what == "half":
            client.piece(of, halves[0][0], end=False)
        else:
            client.piece(of, halves[1][0], end=True)


async def check(client: H2Client, names) -> None:
    for of, answer in (await client.until_all()).items():
        name = names[IDS.index(of)]
        assert answer.is_over, f"the call of stream {of} is lost"
        if name == "nope":
            assert answer.status == NOT_FOUND
            continue
        assert (answer.status, answer.text) == (0, "")
        found = pb.ModelInferResponse.FromString(answer.data[5:])
        assert (found.model_name, found.id) == (name, str(of))


async def test_every_call_is_answered_in_whatever_order_its_data_comes(proxy):
    for order, models, pieces in itertools.product(ORDERS, MODELS, (1, 3)):
        with case(order.id, models, pieces):
            async with h2_to(proxy.address) as client:
                play(client, *order.values, MODELS[models], pieces)
                await check(client, MODELS[models])
