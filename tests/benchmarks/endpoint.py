"""What calls of the endpoint cost whose models are loaded, on disk, or in a store alone."""

import tempfile
from contextlib import closing
from pathlib import Path

from tests.benchmarks.cold import called, cold
from tests.benchmarks.figures import Json, difference, of
from tests.benchmarks.inference import head_of
from tests.benchmarks.mix import mix
from tests.benchmarks.place import Scale, Side, in_turns
from tests.benchmarks.rows import CALLERS
from tests.running import EXAMPLES, embedded_adapter

_ROUNDS, _PAIRS, _SECONDS = 5, 3, 0.6


def endpoint(scale: Scale) -> Json:
    """Three parts, each with servers of its own."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as name:
        folder = Path(name)
        return {**cold(scale, folder), **mix(scale, folder), **warm(scale, folder)}


def warm(scale: Scale, folder: Path) -> Json:
    """CPU of a call whose model is loaded, and of `/models/NAME/invoke` with the same headers.
    Those of curl stay the same, those of boto3 differ in each call.
    """
    rounds, seconds = (1, 0.3) if scale.is_quick else (_ROUNDS * _PAIRS, _SECONDS)
    flags = (f"--model-store={EXAMPLES}", f"--cache-dir={folder / 'warm'}")
    with embedded_adapter(*flags) as adapter:
        with closing(adapter.client()) as client:
            called(client, "identity", "miss")
        asked = f"--metadata=grpc://{adapter.grpc_address}"
        sides = {
            f"{way} {client}": Side(
                (f"http://{adapter.http}", asked, f"--protocol={protocol}", head_of(client)),
                adapter.process.pid,
            )
            for client in CALLERS
            for way, protocol in (("endpoint", "endpoint-json"), ("invoke", "sagemaker-json"))
        }
        taken = ("--connections=8", f"--duration={seconds}", "--warmup=0.2")
        found = in_turns(sides, rounds, *taken)
    more = {
        "added_curl": ("endpoint curl", "invoke curl"),
        "added_boto3": ("endpoint boto3", "invoke boto3"),
        "added_in_all": ("endpoint boto3", "invoke curl"),
    }
    return {
        **{name: difference(found, "cpu", *pair, 1e6, pairs=_PAIRS) for name, pair in more.items()},
        **{f"{name.replace(' ', '_')}_us": of(found, name, "cpu", 1e6) for name in sides},
    }
