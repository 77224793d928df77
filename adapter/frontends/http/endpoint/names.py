"""Names of endpoints and of the models that their callers ask for."""

from collections.abc import Collection

from adapter.core.artifacts import ArtifactKey, parse_artifact_path
from adapter.core.model import ModelId, parse_model_id
from adapter.errors import InvalidCall, InvalidRequest
from adapter.frontends.http.endpoint.errors import ACCOUNT


class Endpoints:
    """The endpoints by name. `takes_all`: there is a store that answers to all other names.

    A model of an endpoint is known by ENDPOINT/KEY to all listeners (control/residency), so that
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
        if not store and (first := target.partition("/")[0]) in self._names:
            why = f"{first!r} is the name of an endpoint, which has models of its own"
            raise InvalidCall(f"Invalid target model: {why}")
        return model_id, key


def missing(key: ArtifactKey) -> str:
    """Return what a caller is told of a model that is not there, or not for them."""
    where = f"endpoint: {key.store}, key: {key.path}" if key.store else f"key: {key.path}"
    return (
        f"Failed to download model data ({where}). Please ensure that there is an object of this "
        "key in the store of the endpoint, and that you may use it."
    )
