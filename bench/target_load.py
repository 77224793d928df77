"""The connections of one target, and the requests for it."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from adapter.errors import BackendUnavailable
from bench.connection import ClientProtocol, Connection, Failure, Finish
from bench.http1 import HttpClientProtocol
from bench.http2 import GrpcClientProtocol
from bench.payload import Payload
from bench.plan import Headers, Plan, Protocol, Target
from bench.requests import Request, build, is_in_all, renewed

if TYPE_CHECKING:
    from bench.load import Load

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_PICKS = 4096
_SEED = 1  # a repeated run asks for the same models in the same order


class TargetLoad:
    def __init__(self, plan: Plan, target: Target, payloads: Mapping[str, Payload]) -> None:
        self.target = target
        self.requests = _mixed(plan, target, payloads)
        self._connections = [
            Connection(target.address, _protocol(target, plan.headers), self._done)
            for _ in range(plan.pace.connections)
        ]
        self.slots = self._connections * plan.pace.streams
        self.load: Load | None = None  # what uses the connections at present

    async def open(self) -> None:
        """Open every connection, or raise an error after all attempts have ended."""
        opening = (connection.open() for connection in self._connections)
        for error in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(error, OSError):
                text = f"{self.target.url}: {str(error) or 'no answer'}"
                raise BackendUnavailable(text, delivered=False) from error
            if error is not None:
                raise error

    def _done(self, connection: Connection, due: float, failure: Failure | None) -> None:
        if self.load is not None:
            self.load.done(connection, due, failure)

    def close(self) -> None:
        self.load = None
        for connection in self._connections:
            connection.close()


def _protocol(target: Target, headers: Headers) -> Callable[[Finish], ClientProtocol]:
    if target.protocol is Protocol.GRPC:
        metadata = tuple(header for header in headers if is_in_all(header))
        return lambda finish: GrpcClientProtocol(finish, target.address.authority, _INFER, metadata)
    return HttpClientProtocol


def _mixed(plan: Plan, target: Target, payloads: Mapping[str, Payload]) -> Iterator[Request]:
    """Yield requests for ever: each recorded head in turn, each with models by popularity."""
    found = []
    for head in plan.heads or ((),):
        requests = [
            build(target, model, payload, plan.headers, head) for model, payload in payloads.items()
        ]
        is_fixed = not any(request.differs for request in requests)
        picked = popular(requests, plan.zipf)
        found.append(picked if is_fixed else map(renewed, picked))
    return found[0] if len(found) == 1 else itertools.chain.from_iterable(zip(*found, strict=True))


def popular(requests: Sequence[Request], exponent: float) -> Iterator[Request]:
    """Yield requests for ever, the k-th with a weight of 1 / k^exponent (Zipf)."""
    if len(requests) == 1:
        return itertools.repeat(requests[0])
    weights = [1 / rank**exponent for rank in range(1, len(requests) + 1)]
    return _picks(requests, list(itertools.accumulate(weights)))


def _picks(requests: Sequence[Request], weights: Sequence[float]) -> Iterator[Request]:
    source = random.Random(_SEED)  # noqa: S311 - a popularity
    while True:
        yield from source.choices(requests, cum_weights=weights, k=_PICKS)
