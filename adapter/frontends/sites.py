"""Refuses what pages of other sites make a browser send (docs/security.md, Pages in a browser).

A browser says in Origin and Sec-Fetch-Site which page a request is from, and no page can change
that. On loopback the name in Host counts too: a page whose name was made to point at this machine
(DNS rebinding) is of the same origin as we are, but calls us by that name.
"""

from collections.abc import Collection
from ipaddress import ip_address

from multidict import CIMultiDict, CIMultiDictProxy

from adapter.errors import Forbidden
from adapter.settings import Address

_READING = frozenset({"GET", "HEAD"})
_OWN_SITES = frozenset({"same-origin", "none"})
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class SitePolicy:
    """Which requests a listener at `address` takes. `allowed_hosts`: names that callers may use for
    it on loopback besides `localhost` and IP addresses of loopback, and whose pages may call it.
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
                    "the setting allowed_hosts names the hosts of a proxy in front of it"
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
        """Whether the value of a header Host may be meant for this listener."""
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
