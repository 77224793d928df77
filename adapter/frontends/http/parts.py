"""Holds the parts that all connections and inferences of a listener share."""

from dataclasses import dataclass

from adapter.core.calls import FastDataPlane
from adapter.frontends.access import SitePolicy
from adapter.frontends.http.instrumentation import Clock, Instrumentation
from adapter.runtime.byte_budget import ByteBudget
from adapter.telemetry.tracing import Tracing


@dataclass(slots=True)
class Parts:
    """Holds the parts that all connections and inferences of a listener share."""

    dataplane: FastDataPlane
    instrumentation: Instrumentation
    clock: Clock
    budget: ByteBudget
    sites: SitePolicy
    max_body_bytes: int
    shares_memory: bool = False  # inferences may name regions of shared memory
    tracing: Tracing | None = None
    accepts_requests: bool = True  # a connection may send another request
