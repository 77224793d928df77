"""Maps a caller's model id to its name in Triton, on disk and in the logs of the stubs.

Triton pastes model names into paths, shared-memory keys and, before 25.08, a shell command; from
26.03 on it refuses `/` and `..` (docs/design/triton.md, Names). So only a safe path segment is used
as it is; every other id gets a private name made of safe characters alone:

    fraud-v2.tar.gz    fraud-v2.tar.gz
    team/a b           ta.u.team_2fa_20b         each other byte as _hh
    (longer than 200)  ta.h.<sha256 of the id>
    (name is stuck)    ta.r.<n>.<sha256 of the id>
"""

import hashlib
import re

from adapter.core.model import ModelId, TritonName

PRIVATE_PREFIX = "ta."
_ESCAPED = "ta.u."
_HASHED = "ta.h."
_REPLACED = "ta.r."
_MAX_BYTES = 200
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-")


def is_safe(model_id: str) -> bool:
    return (
        len(model_id) <= _MAX_BYTES
        and _SAFE.fullmatch(model_id) is not None
        and ".." not in model_id
        and not model_id.startswith(PRIVATE_PREFIX)
    )


def triton_name(model_id: ModelId) -> TritonName:
    """Return the model's name in Triton: always the same, and different for different ids."""
    if is_safe(model_id):
        return TritonName(model_id)
    raw = model_id.encode()
    escaped = _ESCAPED + "".join(chr(b) if b in _PLAIN else f"_{b:02x}" for b in raw)
    if len(escaped) <= _MAX_BYTES:
        return TritonName(escaped)
    return TritonName(_HASHED + hashlib.sha256(raw).hexdigest())


def replacement_name(model_id: ModelId, number: int) -> TritonName:
    """Return another name, one for each number, while Triton is stuck with the first."""
    return TritonName(f"{_REPLACED}{number}.{hashlib.sha256(model_id.encode()).hexdigest()}")
