"""Finds the handler of each call, by one table of routes."""

from collections.abc import Collection, Mapping

from adapter.core.model import ModelId, parse_model_id
from adapter.errors import InvalidRequest, MethodNotAllowed, NotPassedThrough
from adapter.frontends.access import Access
from adapter.frontends.http.connection import Request
from adapter.frontends.http.serve import Handle
from adapter.frontends.routes import Match, Route

# The largest body of a load or another control call; loads that bring files may have more.
CONTROL_BODY_BYTES = 2**20


class Calls:
    """Finds the handlers of the calls of a listener."""

    def __init__(
        self,
        access: Access,
        handlers: Mapping[str, Mapping[str, Handle]],  # by contract and operation
        passthrough: Collection[str] = (),  # the items of that setting
        endpoint: Handle | None = None,  # answers what is meant for an endpoint
    ) -> None:
        self._access = access
        self._handlers = handlers
        self._passthrough = passthrough
        self._endpoint = endpoint

    def find(self, request: Request) -> Handle:
        """Return the handler of a call; raise the error to refuse it with."""
        head = request.head
        if self._endpoint is not None and head.contract_name == "endpoint":
            return self._endpoint
        match = head.match
        if match is None:
            raise InvalidRequest(head.path_error or f"unknown path {request.raw_path[:200]!r}")
        request.path_template = match.path
        set_model(request, match)
        # HEAD is GET without the body
        route = match.methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            self._check_passthrough(next(iter(match.methods.values())))
            raise _refuse_method(request, match)
        request.frontend = route.contract
        request.operation = route.operation
        self._access.check(route.scope, request.headers.getall("Authorization", ()))
        self._check_passthrough(route)
        return self._handlers[route.contract][route.operation]

    def _check_passthrough(self, route: Route) -> None:
        """Raise NotPassedThrough for a route that the setting passthrough does not open."""
        needed = route.passthrough
        if needed is not None and needed not in self._passthrough:
            text = "this call is not forwarded to Triton: the setting passthrough lacks"
            raise NotPassedThrough(
                f"{text} {needed!r}; see docs/v2.md#calls-about-the-whole-server"
            )


def refuse_compressed(request: Request) -> None:
    """Raise InvalidRequest if the body is compressed, of a call that does not go to Triton."""
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise InvalidRequest("a body of this call must not be compressed")


def set_model(request: Request, match: Match) -> None:
    """Set the request's model id from the path, if that names a model. Raises InvalidRequest for a
    name that no model can have.
    """
    name = match.names.get("model_name")
    if name is not None:
        request.model_id = parse_model_id(name)


def model_of(request: Request) -> ModelId:
    """Return the model that the path of a request names."""
    assert request.model_id is not None  # noqa: S101 - its route has the model's name
    return request.model_id


def _refuse_method(request: Request, match: Match) -> MethodNotAllowed:
    """Return the error of a method that the path does not allow."""
    allowed = ", ".join(f"{one}, HEAD" if one == "GET" else one for one in match.methods)
    text = f"{request.method} is not allowed here; allowed: {allowed}"
    return MethodNotAllowed(text, allowed=allowed)
