"""Decides which calls a listener answers, and which of them need the token.

It also refuses what pages of other sites make a browser send (docs/security.md, Pages in a
browser), by one rule for all listeners. Only browsers send Origin: with each POST, and with what
one site's page asks of another. It names the page's site, and no page can change it. Host is no
evidence of where a page is from: a page whose name was made to point at this machine (DNS
rebinding) sends that name in both. On loopback Host is checked too, as a browser sends no Origin
with a GET of a page to its own site.
"""

import hmac
from collections.abc import Collection, Sequence
from ipaddress import ip_address

from multidict import CIMultiDict, CIMultiDictProxy

from adapter.errors import Forbidden, InferenceOnly, Unauthenticated
from adapter.frontends.routes import Scope
from adapter.settings import Address

_SCHEME = "bearer"
_SIGNED_ONLY = "with endpoint_keys, only signed calls of the endpoint reach models"
_SEE_PAGES = "see docs/security.md#pages-in-a-browser"
_SEE_TOKEN = "see docs/security.md#the-control-token"  # noqa: S105
_REPOSITORY = frozenset({"model_repository", "model_repository(unload_dependents)"})
# by the item of the setting `passthrough` that opens them
_OPENED_BY = {
    "shared_memory": frozenset({"system_shared_memory", "cuda_shared_memory"}),
    "trace": frozenset({"trace"}),
    "log": frozenset({"logging"}),
}


class Access:
    """Knows the rights of the callers of one listener."""

    def __init__(
        self,
        name: str,  # of the listener
        *,
        # inference, and reading health and metadata; no loads, unloads, repository, shared memory,
        # trace and log settings
        infers_only: bool = False,
        token: str | None = None,  # demanded of calls that load, unload and drain
        # the endpoint has keys: only who has the token reaches models without them
        is_keyed: bool = False,
    ) -> None:
        self.name = name
        self.infers_only = infers_only
        self.is_keyed = is_keyed
        self._token = None if token is None else token.encode()

    def check(
        self,
        scope: Scope,
        authorization: Sequence[str],  # the values of the headers of that name
    ) -> None:
        """Raise InferenceOnly, Unauthenticated or Forbidden, whatever model the call names."""
        if self.infers_only and scope > Scope.METADATA:
            raise InferenceOnly(
                f"this listener, {self.name}, serves inference alone; loads, unloads and lists "
                "of models are at the listeners http and grpc"
            )
        if self._token is not None and scope is Scope.CONTROL:
            _check_token(self._token, authorization)
        elif self.is_keyed and scope is not Scope.SERVER:
            self._check_keyed(authorization)

    def _check_keyed(self, authorization: Sequence[str]) -> None:
        try:
            if self._token is not None:
                _check_token(self._token, authorization)
                return
        except Unauthenticated as error:
            raise Forbidden(f"{_SIGNED_ONLY}; otherwise {error}") from error
        raise Forbidden(f"{_SIGNED_ONLY}; see docs/endpoint.md#signed-calls")


def _check_token(token: bytes, authorization: Sequence[str]) -> None:
    scheme, _, credentials = authorization[0].partition(" ") if authorization else ("", "", "")
    if scheme.lower() != _SCHEME:
        raise Unauthenticated(
            f"this call needs `Authorization: Bearer TOKEN`; {_SEE_TOKEN}", is_wrong=False
        )
    # in constant time: what is answered when says nothing of how much of it was right
    is_same = hmac.compare_digest(credentials.strip().encode("utf-8", "surrogateescape"), token)
    if not is_same or len(authorization) > 1:
        raise Unauthenticated(
            f"the token of this call is not control_token; {_SEE_TOKEN}", is_wrong=True
        )


class SitePolicy:
    """Refuses requests of pages of other sites, by the Host and Origin of a request."""

    def __init__(
        self,
        address: Address,  # of the listener
        allowed_hosts: Collection[str],  # hosts of pages that may call, and names on loopback
        token: str | None = None,  # demanded by the listener for loads and drains
    ) -> None:
        self._is_on_loopback = address.is_loopback
        self._allowed = frozenset(name.lower() for name in allowed_hosts)
        self._token = None if token is None else token.encode()

    def check(self, headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> None:
        """Raise Forbidden for a request by an unknown name or of a page of another site."""
        for host in headers.getall("Host", ()):
            if not self.knows_host(host):
                raise Forbidden(
                    f"this listener, on loopback, is not known as {host[:200]!r}; "
                    f"add the host name of a proxy to allowed_hosts; {_SEE_PAGES}"
                )
        for origin in headers.getall("Origin", ()):
            if not self._knows_origin(origin) and not self._has_token(headers):
                raise Forbidden(
                    f"this is from a page of another site (Origin: {origin[:200]!r}); "
                    f"add the host name of pages that may call to allowed_hosts; {_SEE_PAGES}"
                )

    def knows_host(self, host: str) -> bool:
        """Return whether a Host header may be meant for this listener."""
        return not self._is_on_loopback or self._is_allowed(host) or _is_loopback(host)

    def _knows_origin(self, origin: str) -> bool:
        """Return whether a page of this origin may call; `null` is that of a page without one."""
        _, _, authority = origin.strip().partition("://")
        return self._is_allowed(authority) or _is_loopback(authority)

    def _has_token(self, headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> bool:
        """Return whether the request has the listener's token, which no foreign page knows."""
        if self._token is None:
            return False
        try:
            _check_token(self._token, headers.getall("Authorization", ()))
        except Unauthenticated:
            return False
        return True

    def _is_allowed(self, authority: str) -> bool:
        return _name_in(authority) in self._allowed


def _name_in(authority: str) -> str:
    """Return the host of an authority without its port, also that of `[::1]:8080`."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].lower().removesuffix(".")


def _is_loopback(authority: str) -> bool:
    name = _name_in(authority)
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761 section 6.3
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


class Extensions:
    """Knows which of Triton's extensions a listener serves."""

    def __init__(
        self,
        passthrough: Collection[str],
        *,
        has_repository: bool = True,  # models can be loaded and unloaded at the listener
    ) -> None:
        closed = [names for item, names in _OPENED_BY.items() if item not in passthrough]
        if not has_repository:
            closed.append(_REPOSITORY)
        self._closed = frozenset[str]().union(*closed)

    def served(self, tritons: Sequence[str]) -> list[str]:
        """Return those of Triton's extensions that are served here."""
        return [name for name in tritons if name not in self._closed]
