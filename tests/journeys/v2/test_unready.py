"""An adapter whose Triton hangs asks the clients of its open connections to go elsewhere."""

import os
import signal

import pytest

from adapter.relay import frames
from tests.constants import NEVER, TRITON_HANG
from tests.frontends.grpc.proxy_listener import frame, head_of, prefixed, wire_to
from tests.processes import suspend, tritonserver
from tests.running import embedded_adapter

pytestmark = pytest.mark.triton


async def test_goaway_is_sent_when_triton_hangs():
    with embedded_adapter(constants={TRITON_HANG: NEVER}) as adapter:
        async with wire_to(adapter.grpc) as wire:
            wire.greet()
            path = "/inference.GRPCInferenceService/ServerReady"
            wire.send(frame(frames.HEADERS, frames.END_HEADERS, 1, head_of(path)))
            wire.send(frame(frames.DATA, frames.END_STREAM, 1, prefixed(b"")))
            assert (await wire.answer(1))[0] == prefixed(b"\x08\x01")
            pid = tritonserver(adapter)
            suspend(pid)
            try:
                await wire.until(frames.GOAWAY)
            finally:
                os.kill(pid, signal.SIGCONT)
