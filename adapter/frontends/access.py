"""Decides which calls a listener answers, and which of them need the token.

It also refuses what pages of other sites make a browser send (docs/security.md, Pages in a
browser). A browser says in Origin and Sec-Fetch-Site which page a request is from, and no page can
change that. On loopback the name in Host counts too: a page whose name was made to point at this
machine (DNS rebinding) is of the same origin as we are, but calls us by that name.
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
_SEE_TOKEN = "see docs/security.md#the-control-token"  # noqa: S105
_READING = frozenset({"GET", "HEAD"})
_OWN_SITES = frozenset({"same-origin", "none"})
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_REPOSITORY = frozenset({"model_repository", "model_repository(unload_dependents)"})
# by the item of the setting `passthrough` that opens them
_OPENED_BY = {
    "shared_memory": frozenset({"system_shared_memory", "cuda_shared_memory"}),
    "trace": frozenset({"trace"}),
    "log": frozenset({"logging"}),
}


class Access:
    """The rights of callers of the listener `name`. `infers_only`: inference, and reading what
    health and metadata tell; no loads, unloads, repository, shared memory, trace and log settings.
    `token`: what calls that load, unload and drain must bring, None for nothing. `is_keyed`: the
    endpoint has keys, so that nobody may go round it who has not the token.
    """

    def __init__(
        self,
        name: str,
        *,
        infers_only: bool = False,
        token: str | None = None,
        is_keyed: bool = False,
    ) -> None:
        self.name = name
        self.infers_only = infers_only
        self.is_keyed = is_keyed
        self._token = None if token is None else token.encode()

    def check(self, scope: Scope, authorization: Sequence[str]) -> None:
        """Raise InferenceOnly, Unauthenticated or Forbidden, whatever model the call names.
        `authorization`: the headers of that name.
        """
        if self.infers_only and scope > Scope.METADATA:
            raise InferenceOnly(
                f"this listener, {self.name}, serves inference alone; loads, unloads and lists "
                "of models are at the listener http"
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
    scheme, _, given = authorization[0].partition(" ") if authorization else ("", "", "")
    if scheme.lower() != _SCHEME:
        raise Unauthenticated(
            f"this call needs `Authorization: Bearer TOKEN`; {_SEE_TOKEN}", is_wrong=False
        )
    # in constant time: what is answered when says nothing of how much of it was right
    is_same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token)
    if not is_same or len(authorization) > 1:
        raise Unauthenticated(
            f"the token of this call is not control_token; {_SEE_TOKEN}", is_wrong=True
        )


class SitePolicy:
    """Decides which requests a listener at `address` takes. `allowed_hosts`: names that callers may
    use for it on loopback besides `localhost` and IP addresses of loopback, and whose pages may
    call it.
    """

    def __init__(self, address: Address, allowed_hosts: Collection[str]) -> None:
        self._is_on_loopback = address.is_loopback
        self._allowed = frozenset(name.lower() for name in allowed_hosts)

    def check(self, method: str, headers: CIMultiDict[str] | CIMultiDictProxy[str]) -> None:
        """Raise Forbidden for a request that no caller of ours sends."""
        hosts = headers.getall("Host", ())
        for host in hosts:
            if not self.knows_host(host):
                raise Forbidden(
                    f"this listener, on loopback, is not known as {host[:200]!r}; "
                    "add the host name of a proxy to allowed_hosts; "
                    "see docs/security.md#pages-in-a-browser"
                )
        if method in _READING:
            return
        for site in headers.getall("Sec-Fetch-Site", ()):
            if site.strip().lower() not in _OWN_SITES:
                raise Forbidden(f"{method} from a page of another site (Sec-Fetch-Site: {site!r})")
        for origin in headers.getall("Origin", ()):
            if not self._is_ours(origin, hosts):
                raise Forbidden(f"{method} from a page of another site (Origin: {origin[:200]!r})")

    def knows_host(self, host: str) -> bool:
        """Return whether a Host header may be meant for this listener."""
        return not self._is_on_loopback or not host or self._is_allowed(host) or _is_loopback(host)

    def _is_ours(self, origin: str, hosts: Collection[str]) -> bool:
        scheme, _, authority = origin.strip().lower().partition("://")
        if not authority:
            return False  # `null`, of a page without an origin
        port = _DEFAULT_PORTS.get(scheme, "")
        own = {host.lower().removesuffix(port) for host in hosts}
        return authority.removesuffix(port) in own or self._is_allowed(authority)

    def _is_allowed(self, authority: str) -> bool:
        return _name_in(authority) in self._allowed


def _name_in(authority: str) -> str:
    """The host without its port, as `[::1]:8080` has it too."""
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
    """`has_repository`: models can be loaded and unloaded at the listener."""

    def __init__(self, passthrough: Collection[str], *, has_repository: bool = True) -> None:
        closed = [names for item, names in _OPENED_BY.items() if item not in passthrough]
        if not has_repository:
            closed.append(_REPOSITORY)
        self._closed = frozenset[str]().union(*closed)

    def served(self, tritons: Sequence[str]) -> list[str]:
        """Return those of Triton's extensions that are served here."""
        return [name for name in tritons if name not in self._closed]
