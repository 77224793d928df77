"""Which of Triton's protocol extensions a listener serves, and so tells its clients of."""

from collections.abc import Collection, Sequence

_REPOSITORY = frozenset({"model_repository", "model_repository(unload_dependents)"})
# by the item of the setting `passthrough` that opens them
_OPENED_BY = {
    "shared_memory": frozenset({"system_shared_memory", "cuda_shared_memory"}),
    "trace": frozenset({"trace"}),
    "log": frozenset({"logging"}),
}


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
