"""On what terms a model is loaded, and whether another version may be loaded beside it."""

from dataclasses import dataclass, field

from adapter.core.model import Package
from adapter.core.registry import ModelRecord
from adapter.errors import AboutMemory

_SEQUENCES = "sequence_batching"  # requests of one sequence belong to one version


@dataclass(slots=True)
class Terms:
    """The terms of one load, however often it is tried. `is_on_demand`: for calls, so that it may
    be evicted, until a platform asks for the same load. `evicts`: others are evicted for it where
    it does not fit. `is_planned`: ModelMesh has made room for it by its own books. `takes_over`:
    the loaded model whose place it takes; that one gets the id of this one. `unloads_first`: the
    loaded model of this id is unloaded before the load. `gpu`: the number of
    the one that it is being put on; `ran_out`: why it cannot be on others, by their numbers, until
    some model is evicted for it.
    """

    is_on_demand: bool = False
    evicts: bool = True
    is_planned: bool = False
    takes_over: ModelRecord | None = None
    unloads_first: bool = False
    gpu: int | None = None
    ran_out: dict[int, AboutMemory] = field(default_factory=dict)

    def refusal(self) -> AboutMemory:
        """Return why the load was tried elsewhere, where no other GPU has room for it."""
        return next(iter(self.ran_out.values()))

    def goes_elsewhere(self, error: AboutMemory) -> bool:
        """Note that the load has failed; return whether to try another GPU, as it ran out of memory
        on the one that was chosen for it.
        """
        if self.gpu is None:
            self.ran_out.clear()
            return False
        self.ran_out[self.gpu], self.gpu = error, None
        return True


def can_be_doubled(package: Package) -> bool:
    """Return whether two versions may be loaded at a time. Not those of a package of several
    models or folders, which know each other by name, nor of one that keeps state from request to
    request.
    """
    texts = [part.config_text or "" for part in package.parts]
    return (
        len(texts) <= 1 and not package.neighbours and not any(_SEQUENCES in text for text in texts)
    )
