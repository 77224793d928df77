"""Verifies AWS's Signature Version 4: first the head, without the key, and then all with the body.

A signature covers the method, the path, the headers that it names and the hash of the body. It may
be of any region: an endpoint of one's own has none.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

ALGORITHM = "AWS4-HMAC-SHA256"
SERVICE = "sagemaker"
SKEW_SECONDS = 300

_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} +Credential=([^/,\s]+)/([0-9]{{8}})/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request, *"
    r"SignedHeaders=([a-z0-9;_-]+), *Signature=([0-9a-f]{64})"
)
_TIME = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_HASH_FORM = re.compile(r"[0-9a-f]{64}")
_HASH = "x-amz-content-sha256"
_DATE = "x-amz-date"
_HOST = "host"
# What else means something must be signed where it is there: all of the service's own, and what
# says how the body is read.
_SIGNED_IF_THERE = ("x-amzn-sagemaker-", "x-amz-", "content-type", "content-encoding")


_OTHER_BODY = (
    f"The header {_HASH} must be the SHA-256 of the body; unsigned and streamed bodies are not "
    "accepted."
)


class SignatureError(Exception):
    """The signature is wrong; the text says how."""


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """The parts of a request that a signature covers."""

    method: str
    target: str  # the path as it was sent
    headers: Sequence[tuple[str, str]]  # every header, in the order of the request
    body_hash: str  # the SHA-256 of the body in hex; empty as long as the body has not come


@dataclass(frozen=True, slots=True)
class Claim:
    """The signature of a request, as its headers state it."""

    access_key: str
    scope: str
    time: str
    signed: tuple[str, ...]
    signature: str


def read_claim(request: SignedRequest, now: datetime) -> Claim:
    """Return the signature that the headers state. Raise SignatureError for whatever can be judged
    without the key and the body.
    """
    headers = _group_by_name(request.headers)
    match = _AUTHORIZATION.fullmatch(_read_single(headers, "authorization"))
    if match is None:
        raise SignatureError(
            f"The header Authorization is not an {ALGORITHM} signature of {SERVICE}; a signature "
            "in the query is not accepted."
        )
    access_key, day, region, service, names, signature = match.groups()
    if service != SERVICE:
        raise SignatureError(f"Credential should be scoped to correct service: '{SERVICE}'.")
    signed = tuple(names.split(";"))
    _check_signed(headers, signed)
    time = _read_single(headers, _DATE)
    _check_time(time, day, now)
    if "?" in request.target:
        raise SignatureError("A signed request has no query here.")
    if _HASH in headers and _HASH_FORM.fullmatch(_read_single(headers, _HASH)) is None:
        raise SignatureError(_OTHER_BODY)
    return Claim(access_key, f"{day}/{region}/{service}/aws4_request", time, signed, signature)


def check_body(request: SignedRequest) -> None:
    """Raise SignatureError if the head names the hash of another body."""
    if _group_by_name(request.headers).get(_HASH, [request.body_hash]) != [request.body_hash]:
        raise SignatureError(_OTHER_BODY)


def is_signed_by(claim: Claim, secret: str, request: SignedRequest) -> bool:
    """Return whether the signature was made with this secret. The comparison takes the same time
    whatever differs.
    """
    canonical = _make_canonical_request(request, claim.signed).encode("utf-8", "surrogateescape")
    hashed = hashlib.sha256(canonical).hexdigest()
    text = f"{ALGORITHM}\n{claim.time}\n{claim.scope}\n{hashed}"
    key = f"AWS4{secret}".encode()
    for part in claim.scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.compare_digest(hmac.digest(key, text.encode(), "sha256").hex(), claim.signature)


def _make_canonical_request(request: SignedRequest, signed: Sequence[str]) -> str:
    """Return the canonical request of AWS's specification, with the headers that are signed."""
    headers = _group_by_name(request.headers)
    lines = [f"{name}:{','.join(map(_trim, headers[name]))}" for name in signed]
    path = quote(request.target, safe="/~", errors="surrogateescape")
    return "\n".join((request.method, path, "", *lines, "", ";".join(signed), request.body_hash))


def _trim(value: str) -> str:
    """Return a header's value with a single blank for each run of blanks, and none at its ends."""
    return " ".join(value.split())


def _group_by_name(headers: Sequence[tuple[str, str]]) -> Mapping[str, list[str]]:
    """Return the values of the headers by their names in lower case."""
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name.lower(), []).append(value)
    return values


def _read_single(headers: Mapping[str, list[str]], name: str) -> str:
    """Return the value of a header that must be there once. Raises SignatureError."""
    values = headers.get(name, [])
    if len(values) != 1:
        raise SignatureError(f"The header {name} is there {len(values)} times; it must be once.")
    return values[0]


def _check_signed(headers: Mapping[str, list[str]], signed: Sequence[str]) -> None:
    """Raise SignatureError if a header that must be signed is not, or is there more than once."""
    if list(signed) != sorted(set(signed)) or not headers.keys() >= set(signed):
        raise SignatureError("SignedHeaders must name headers of the request, in order.")
    needed = {_HOST, _DATE} | {name for name in headers if name.startswith(_SIGNED_IF_THERE)}
    missing = sorted(needed - set(signed))
    if missing:
        raise SignatureError(f"These headers must be signed: {', '.join(missing)}.")
    for name in needed:
        _read_single(headers, name)


def _check_time(time: str, day: str, now: datetime) -> None:
    """Raise SignatureError for a time of signing that is malformed, not of the `day` in the scope,
    or too far from `now`.
    """
    signed_at = _read_time(time)
    if signed_at is None:
        raise SignatureError(f"The header {_DATE} is not a time such as 20261122T143000Z.")
    if not time.startswith(day):
        raise SignatureError(f"Credential is of another day than {_DATE}.")
    seconds = (now - signed_at).total_seconds()
    if abs(seconds) > SKEW_SECONDS:
        kind = "expired" if seconds > 0 else "not yet current"
        raise SignatureError(
            f"Signature {kind}: {time} is {abs(seconds):.0f} s off; {SKEW_SECONDS} s are accepted."
        )


def _read_time(text: str) -> datetime | None:
    """Return the time that a text means; None if it is none."""
    if _TIME.fullmatch(text) is None:
        return None
    try:
        return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:  # there is no such day
        return None
