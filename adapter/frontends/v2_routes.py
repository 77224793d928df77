"""A place under /v2: what it is called in metrics, and what each method does there."""

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from adapter.frontends.http import Handler, method_not_allowed


@dataclass(frozen=True, slots=True)
class Route:
    """`needs` is what the setting `passthrough` must hold for it to be open. A method with None is
    served elsewhere.
    """

    operation: str
    methods: Mapping[str, Handler | None]
    needs: str | None = None

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """HEAD is GET without the body."""
        handler = self.methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise method_not_allowed(request, self.methods)
        request["frontend"], request["operation"] = "v2", self.operation
        return await handler(request)
