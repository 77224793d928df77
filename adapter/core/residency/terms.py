"""On what terms a model is loaded."""

from dataclasses import dataclass

from adapter.core.registry import ModelRecord


@dataclass(slots=True)
class Terms:
    """Of one load, however often it is tried. `is_on_demand`: for calls, so that it may be evicted,
    until a platform asks for the same load. `evicts`: others are evicted for it where it does not
    fit. `is_planned`: ModelMesh has made room for it by its own books. `takes_over`: the loaded
    model whose place it takes; that one gets the id of this one.
    """

    is_on_demand: bool = False
    evicts: bool = True
    is_planned: bool = False
    takes_over: ModelRecord | None = None
