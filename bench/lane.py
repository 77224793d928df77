"""One target with its open connections and the requests for it."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from adapter.errors import BackendUnavailable
from bench.connection import Connection, Failure, Finish, Wire
from bench.http1 import HttpWire
from bench.http2 import GrpcWire
from bench.payload import Payload
from bench.plan import Headers, Plan, Protocol, Target
from bench.requests import Request, build, is_in_all, renewed

if TYPE_CHECKING:
    from bench.load import Load

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_PICKS = 4096
_SEED = 1  # the same run asks for the same models in the same order


class Lane:
    def __init__(self, plan: Plan, target: Target, payloads: Mapping[str, Payload]) -> None:
        self.target = target
        self.requests = _mixed(plan, target, payloads)
        self._connections = [
            Connection(target.address, _wire(target, plan.headers), self._done)
            for _ in range(plan.pace.connections)
        ]
        self.slots = self._connections * plan.pace.streams
        self.load: Load | None = None  # what drives the connections at the moment

    async def open(self) -> None:
        """All of them or, after each has had its end, an error: none is left half open."""
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


def _wire(target: Target, headers: Headers) -> Callable[[Finish], Wire]:
    if target.protocol is Protocol.GRPC:
        metadata = tuple(header for header in headers if is_in_all(header))
        return lambda finish: GrpcWire(finish, target.address.authority, _INFER, metadata)
    return HttpWire


def _mixed(plan: Plan, target: Target, payloads: Mapping[str, Payload]) -> Iterator[Request]:
    """Endless: each head in turn, each with the models as popular as they are."""
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
    """Endless. The k-th of them comes with a weight of 1 / k^exponent (Zipf); 0: all alike."""
    if len(requests) == 1:
        return itertools.repeat(requests[0])
    weights = [1 / rank**exponent for rank in range(1, len(requests) + 1)]
    return _picks(requests, list(itertools.accumulate(weights)))


def _picks(requests: Sequence[Request], weights: Sequence[float]) -> Iterator[Request]:
    source = random.Random(_SEED)  # noqa: S311 - a popularity
    while True:
        yield from source.choices(requests, cum_weights=weights, k=_PICKS)
