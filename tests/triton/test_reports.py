"""What Triton's statistics extension reports of GPU memory, in its own messages."""

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.core.model import TritonName
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.errors import BackendError
from adapter.triton.client import TritonControl
from tests.fakes.versioned_triton import VersionedTriton, serving

M = TritonName("m")


async def asked(repository, statistics, **options):
    """What a Triton with these statistics of m is said to report."""
    triton = VersionedTriton("2.73.0", repository)
    triton.statistics["m"] = statistics
    control = TritonControl(Faults(Classifier(())), load_timeout_seconds=10, **options)
    async with serving(triton) as address:
        control.connect(address)
        try:
            return await control.gpu_bytes(M)
        finally:
            await control.close()


def usage(kind, number, count):
    return pb.MemoryUsage(type=kind, id=number, byte_size=count)


async def test_gpu_memory_is_summed_over_versions(tmp_path):
    statistics = [
        pb.ModelStatistics(
            name="m",
            version="1",
            memory_usage=[usage("CPU", 0, 9), usage("CPU_PINNED", 0, 8), usage("GPU", 0, 5)],
        ),
        pb.ModelStatistics(
            name="m", version="2", memory_usage=[usage("GPU", 0, 2), usage("GPU", 1, 0)]
        ),
    ]
    assert await asked(tmp_path, statistics) == {0: 7, 1: 0}


async def test_statistics_without_the_field_report_nothing(tmp_path):
    assert await asked(tmp_path, [pb.ModelStatistics(name="m", version="1")]) == {}
    assert await asked(tmp_path, []) == {}


async def test_triton_without_extension_is_backend_error(tmp_path):
    with pytest.raises(BackendError):
        await asked(tmp_path, None)
