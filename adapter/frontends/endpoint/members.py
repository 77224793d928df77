"""Reads calls of the endpoint: their members, and the model that they mean.

The limits and patterns of members are those of botocore's model of the service, which boto3 itself
does not enforce.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from multidict import CIMultiDict, CIMultiDictProxy

from adapter.core.artifacts import ArtifactKey, parse_artifact_path
from adapter.core.model import ModelId, parse_model_id
from adapter.errors import InvalidCall, InvalidRequest
from adapter.frontends.endpoint.errors import ACCOUNT, VARIANT

Headers = CIMultiDict[str] | CIMultiDictProxy[str]

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
TARGET_MODEL = "X-Amzn-SageMaker-Target-Model"
COMPONENT = "X-Amzn-SageMaker-Inference-Component"

_NAME = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"
_ASCII = r"[\x00-\x7f]*"
_PRINTED = r"[\x21-\x7e][\x20-\x7e]*"


@dataclass(frozen=True, slots=True)
class Member:
    """A part of a call that a header states, with the values that AWS allows."""

    name: str  # in the messages of AWS
    header: str
    longest: int
    pattern: str
    shortest: int = 0

    def problems(self, value: str) -> Iterator[str]:
        """Yield what is wrong with a value, in the words of AWS."""
        shown = value[:200].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        text = f"Value '{shown}' at '{self.name}' failed to satisfy constraint: Member must"
        if len(value) > self.longest:
            yield f"{text} have length less than or equal to {self.longest}"
        elif len(value) < self.shortest:
            yield f"{text} have length greater than or equal to {self.shortest}"
        elif re.fullmatch(self.pattern, value) is None:
            yield f"{text} satisfy regular expression pattern: {self.pattern}"


_ENDPOINT = Member("endpointName", "", 63, _NAME)
_BOTH = (
    Member("contentType", "Content-Type", 1024, _ASCII),
    Member("customAttributes", CUSTOM_ATTRIBUTES, 1024, _ASCII),
    # Models lie in folders, and the stream operation has no member for the target: so the name of
    # an inference component is taken for one, and may be as long and has the same characters.
    Member("targetModel", TARGET_MODEL, 1024, _PRINTED, 1),
    Member("inferenceComponentName", COMPONENT, 1024, _PRINTED, 1),
    Member("targetVariant", "X-Amzn-SageMaker-Target-Variant", 63, _NAME),
    Member("inferenceId", "X-Amzn-SageMaker-Inference-Id", 64, _PRINTED, 1),
    Member("prefixAwareId", "X-Amzn-SageMaker-Prefix-Aware-Id", 64, _PRINTED, 1),
)
_INVOKE = (*_BOTH, Member("accept", "Accept", 1024, _ASCII))
_STREAM = (*_BOTH, Member("accept", "X-Amzn-SageMaker-Accept", 1024, _ASCII))
# Each asks for something that there is not: to leave it out in silence would be a wrong answer.
_UNSERVED = {
    "X-Amzn-SageMaker-Target-Container-Hostname": "invoke one container directly",
    "X-Amzn-SageMaker-Enable-Explanations": "explain its predictions",
    "X-Amzn-SageMaker-Session-Id": "keep sessions",
}


@dataclass(frozen=True, slots=True)
class Members:
    """Holds what the headers of a call name."""

    endpoint: str
    target: str  # the key of the model, "" where none is named
    variant: str


def read_members(endpoint: str, headers: Headers, *, is_stream: bool) -> Members:
    """Return the members of a call from its headers. Raise InvalidCall with all that is wrong with
    them, in the words of AWS.
    """
    found = {}
    problems = [*_ENDPOINT.problems(endpoint)]
    for member in _STREAM if is_stream else _INVOKE:
        values = headers.getall(member.header, ())
        if len(values) > 1 and member.name != "accept":
            problems.append(f"'{member.name}' is there {len(values)} times")
        elif values:
            problems += member.problems(values[0])
            found[member.name] = values[0]
    if problems:
        what = "validation error" if len(problems) == 1 else "validation errors"
        raise InvalidCall(f"{len(problems)} {what} detected: {'; '.join(problems)}")
    for header, deed in _UNSERVED.items():
        if header in headers:
            raise InvalidCall(f"Endpoint {endpoint} does not {deed} ({header}).")
    return Members(
        endpoint,
        found.get("targetModel") or found.get("inferenceComponentName") or "",
        found.get("targetVariant", VARIANT),
    )


class Endpoints:
    """The endpoints by name. `takes_all`: there is a store that answers to all other names.

    A model of an endpoint is known by ENDPOINT/KEY to all listeners (StoreModels), so that
    no key of the other store may begin with the name of an endpoint.
    """

    def __init__(self, names: Collection[str], *, takes_all: bool) -> None:
        self._names = frozenset(names)
        self._takes_all = takes_all

    def find(self, name: str, target: str) -> tuple[ModelId, ArtifactKey]:
        """Return the model that `target` names, and where it is; raise InvalidCall."""
        if name not in self._names and not self._takes_all:
            raise InvalidCall(f"Endpoint {name} of account {ACCOUNT} not found.")
        try:
            store = name if name in self._names else ""
            key = ArtifactKey(store, parse_artifact_path(target))
            model_id = parse_model_id(str(key))
        except InvalidRequest as error:
            raise InvalidCall(f"Invalid target model: {error}") from error
        first = target.partition("/")[0]
        if not store and first in self._names:
            reason = f"{first!r} is the name of an endpoint, which has models of its own"
            raise InvalidCall(f"Invalid target model: {reason}")
        return model_id, key


def missing(key: ArtifactKey) -> str:
    """Return what a caller is told of a model that is not there, or not for them."""
    where = f"endpoint: {key.store}, key: {key.path}" if key.store else f"key: {key.path}"
    return (
        f"Failed to download model data ({where}). Please ensure that there is an object of this "
        "key in the store of the endpoint, and that you may use it."
    )
