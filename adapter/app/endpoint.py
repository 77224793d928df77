"""Builds the endpoint, where there is a store."""

import os
from collections.abc import Callable, Sequence
from functools import partial

from adapter.app.shared import Shared
from adapter.core.calls import V2DataPlane
from adapter.dataplane.traced import TracedRpc
from adapter.frontends.http.application import Front
from adapter.frontends.http.endpoint.callers import Callers, Key
from adapter.frontends.http.endpoint.endpoint import Endpoint
from adapter.frontends.http.endpoint.fast_path import EndpointInference
from adapter.frontends.http.endpoint.names import Endpoints
from adapter.frontends.http.endpoint.plain import PlainCalls
from adapter.frontends.http.endpoint.streams import Streams
from adapter.frontends.http.fast_path import FastPath, Inference
from adapter.frontends.http.inference import Inferences
from adapter.frontends.http.observer import Observer
from adapter.settings import Settings, parse_endpoint_key


def build_endpoint(
    shared: Shared, dataplane: V2DataPlane, inferences: Inferences, observer: Observer
) -> Endpoint | None:
    settings, residency = shared.settings, shared.residency
    if residency is None:
        return None
    streams = Streams(
        shared.control,
        dataplane,
        TracedRpc(shared.rpc, shared.tracing) if shared.tracing else shared.rpc,
        shared.faults,
        observer,
        timeout_seconds=settings.infer_timeout_seconds,
    )
    return Endpoint(
        shared.control,
        inferences,
        streams,
        residency,
        _endpoints(settings),
        budget=shared.budget,
        max_body_bytes=settings.max_body_bytes,
        callers=_build_callers(settings.endpoint_keys),
    )


def _endpoints(settings: Settings) -> Endpoints:
    names = [endpoint.name for endpoint in settings.endpoints]
    return Endpoints(names, takes_all=settings.model_store is not None)


def plain_calls(shared: Shared) -> PlainCalls | None:
    """Return what tells plain calls from others; None where there are none."""
    if shared.residency is None or shared.settings.endpoint_keys:
        return None
    return PlainCalls(_endpoints(shared.settings))


def inference_kind(shared: Shared) -> Callable[[Front, FastPath], Inference] | None:
    if shared.residency is None:
        return None
    return partial(EndpointInference, residency=shared.residency)


def _build_callers(lines: Sequence[str]) -> Callers | None:
    keys = [parse_endpoint_key(line, os.environ) for line in lines]
    found = {key.access_key: Key(key.secret, key.models) for key in keys}
    return Callers(found) if found else None
