"""Triton's metrics endpoint on a real port, with a page of the test's making."""

import asyncio

from aiohttp import web

MIB = 2**20


class MetricsEndpoint:
    """`used` and `total` are bytes by UUID; `page`, where set, is served as it is.

    `asked` counts the requests, and `connections` those that they came by.
    """

    def __init__(self) -> None:
        self.used: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self.page: bytes | None = None
        self.status = 200
        self.asked = 0
        self._peers: set[object] = set()
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.opened.set()
        self.address = ""
        self._runner: web.ServerRunner | None = None

    @property
    def connections(self) -> int:
        return len(self._peers)

    async def start(self) -> None:
        """On the same port as before."""
        runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
        await runner.setup()
        port = int(self.address.rpartition(":")[2] or 0)
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        self._runner = runner

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def hold(self) -> None:
        """Let requests wait until `opened` is set; `reached` says that one does."""
        self.reached.clear()
        self.opened.clear()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        self.asked += 1
        assert request.transport is not None
        self._peers.add(request.transport.get_extra_info("peername"))
        self.reached.set()
        await self.opened.wait()
        if request.path != "/metrics":
            return web.Response(status=404)
        body = self.page if self.page is not None else self._page()
        return web.Response(status=self.status, body=body, headers={"Location": "/elsewhere"})

    def _page(self) -> bytes:
        """As Triton 2.51 writes it, with a few of its other lines."""
        lines = [
            "# HELP nv_inference_request_success Number of successful inference requests",
            "# TYPE nv_inference_request_success counter",
            'nv_inference_request_success{model="m",version="1"} 3',
            "# HELP nv_cpu_memory_used_bytes CPU used memory (RAM), in bytes",
            "nv_cpu_memory_used_bytes 1073741824",
        ]
        for name, figures in (("total", self.total), ("used", self.used)):
            series = f"nv_gpu_memory_{name}_bytes"
            lines += [f"# HELP {series} GPU {name} memory, in bytes", f"# TYPE {series} gauge"]
            lines += [f'{series}{{gpu_uuid="{uuid}"}} {count}' for uuid, count in figures.items()]
        return "\n".join([*lines, ""]).encode()
