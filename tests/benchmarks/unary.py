"""Measures a small call over gRPC: the adapter, the copying proxy and Triton alone, in turn."""

from functools import partial

from tests.benchmarks.copying import run_copying
from tests.benchmarks.figures import Json, compare, summarize, take_turns
from tests.benchmarks.generators import run_h2load
from tests.benchmarks.place import Scale, Side, read_cpu_seconds, run_stack


def measure_grpc(scale: Scale) -> Json:
    """Measure ModelInfer with a tensor of one float, eight calls in flight on one connection."""
    with run_stack() as adapter, run_copying(adapter.grpc_address) as copying:
        sides = {
            "adapter": Side(adapter.grpc, adapter.process.pid),
            "copying": copying,
            "triton": Side(adapter.grpc_address),
        }
        rounds = take_turns(sides, scale.rounds, partial(_measure_side, scale.seconds))
    return {
        "cpu": compare(rounds, "cpu", "adapter", "copying"),
        "adapter_rate": summarize(rounds, "adapter", "rate"),
        "triton_rate": summarize(rounds, "triton", "rate"),
    }


def _measure_side(seconds: float, side: Side) -> Json:
    before = 0.0 if side.pid is None else read_cpu_seconds(side.pid)
    load = run_h2load(side.address, seconds)
    figures = {"rate": load.answered / load.seconds}
    if side.pid is not None:
        figures["cpu"] = (read_cpu_seconds(side.pid) - before) / load.answered
    return figures
