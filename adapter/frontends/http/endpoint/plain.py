"""Which calls of InvokeEndpoint are plain: nothing is special about them but their model's name."""

import json
import re
from dataclasses import dataclass

from multidict import CIMultiDict

from adapter.core.artifacts import ArtifactKey, CacheUse
from adapter.core.model import ModelId, TritonName
from adapter.core.names import triton_name
from adapter.errors import AdapterError
from adapter.frontends.http.endpoint.errors import CACHE, VARIANT_HEADER
from adapter.frontends.http.endpoint.members import Members, read_members
from adapter.frontends.http.endpoint.names import Endpoints

_TARGET = re.compile(rb"/endpoints/([A-Za-z0-9-]+)/invocations")


@dataclass(frozen=True, slots=True)
class PlainCall:
    """`name`: what Triton knows the model by, unless it was stuck under that name. `given` in JSON
    of Triton becomes `told`.
    """

    members: Members
    model_id: ModelId
    key: ArtifactKey
    name: TritonName
    is_renamed: bool
    given: bytes
    told: bytes

    def lines(self) -> bytes:
        """Return lines of the answer's head."""
        cache, variant = CacheUse.HIT.value, self.members.variant
        return f"{VARIANT_HEADER}: {variant}\r\n{CACHE}: {cache}\r\n".encode()


class PlainCalls:
    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    def read(self, target: bytes, fields: dict[bytes, bytes]) -> PlainCall | None:
        """`fields`: the headers by their names in lower case. None where aiohttp is to answer."""
        found = _TARGET.fullmatch(target)
        if found is None:
            return None
        headers = CIMultiDict((n.decode(), v.decode("latin-1")) for n, v in fields.items())
        try:
            members = read_members(found[1].decode(), headers, is_stream=False)
            model_id, key = self._endpoints.find(members.endpoint, members.target)
        except AdapterError:
            return None
        name = triton_name(model_id)
        given = f'"model_name":"{name}"'.encode()
        told = f'"model_name":{json.dumps(model_id)}'.encode()
        return PlainCall(members, model_id, key, name, str(name) != str(model_id), given, told)
