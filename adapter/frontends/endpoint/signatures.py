"""Decides who may call the endpoint, and for which models: by signatures of AWS, and by patterns
of TargetModel.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from adapter.errors import Forbidden, InvalidSignature
from adapter.frontends.endpoint.sigv4 import (
    Claim,
    SignatureError,
    SignedRequest,
    check_body,
    is_signed_by,
    read_claim,
)
from adapter.runtime.threads import HASHES

# Fewer bytes than these are hashed at once: in 0.1 ms.
_AT_ONCE_BYTES = 64 * 2**10
_WRONG = (
    "The request signature we calculated does not match the signature you provided. Check your "
    "AWS Secret Access Key and signing method."
)


@dataclass(frozen=True, slots=True)
class Key:
    """An access key's secret, and the models that it opens."""

    secret: str
    models: Sequence[str]  # patterns, with `*` for any characters and `?` for one


class Caller:
    """Somebody whose signature is right; `name`: the access key."""

    def __init__(self, models: Sequence[str], name: str = "") -> None:
        self.name = name
        self._may_ask = re.compile("|".join(map(_expression, models)), re.DOTALL)

    def is_allowed(self, path: str) -> bool:
        """Return whether the caller may use the models at a path of the store."""
        return self._may_ask.fullmatch(path) is not None


class SignedCall(Protocol):
    """A request with what is signed of its head."""

    @property
    def method(self) -> str:
        """Its method."""

    @property
    def raw_path(self) -> str:
        """Its target, as it was sent."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers."""


class SigV4Authenticator:
    """The callers who may call; `keys` has them by access key."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._secrets = {name: key.secret for name, key in keys.items()}
        self._callers = {name: Caller(key.models, name) for name, key in keys.items()}

    def judge(self, request: SignedCall) -> Claim:
        """Return whose signature the head claims to have. Raise InvalidSignature for what is wrong
        whatever the body is, and Forbidden for a request without a signature.
        """
        if "Authorization" not in request.headers:
            raise Forbidden("Missing Authentication Token: this endpoint takes signed requests.")
        try:
            claim = read_claim(_make_signed_request(request), datetime.now(UTC))
        except SignatureError as error:
            raise InvalidSignature(str(error)) from error
        if claim.access_key not in self._secrets:
            raise InvalidSignature(_WRONG)
        return claim

    async def find(self, claim: Claim, request: SignedCall, body: bytes) -> Caller:
        """Return the caller, after `judge`; InvalidSignature if it has not signed this."""
        if len(body) <= _AT_ONCE_BYTES:
            hashed = _hash_body(body)
        else:
            hashed = await HASHES.run(_hash_body, body)
        signed = _make_signed_request(request, hashed)
        try:
            check_body(signed)
        except SignatureError as error:
            raise InvalidSignature(str(error)) from error
        if not is_signed_by(claim, self._secrets[claim.access_key], signed):
            raise InvalidSignature(_WRONG)
        return self._callers[claim.access_key]


def _make_signed_request(request: SignedCall, body_hash: str = "") -> SignedRequest:
    """Return what the signature of a call covers."""
    return SignedRequest(request.method, request.raw_path, [*request.headers.items()], body_hash)


def _hash_body(body: bytes) -> str:
    """Return the SHA-256 of a body in hexadecimal digits, as a signature has it."""
    return hashlib.sha256(body).hexdigest()


def _expression(pattern: str) -> str:
    """Return the pattern as a regular expression whose time is linear in each `*`: an atomic group
    takes what comes before the next part, and no later part makes it try another length.
    """
    first, *parts = [re.escape(part).replace(r"\?", ".") for part in pattern.split("*")]
    if not parts:
        return first
    *middle, last = parts
    return first + "".join(f"(?>.*?{part})" for part in middle) + ".*" + last
