"""May another version of a model be loaded beside it?"""

from adapter.core.model import Package

_SEQUENCES = "sequence_batching"  # requests of one sequence belong to one version


def can_be_doubled(package: Package) -> bool:
    """Return whether two versions may be loaded at a time. Not those of a package of several
    models, which know each other by name, nor of one that keeps state from request to request.
    """
    texts = [part.config_text or "" for part in package.parts]
    return len(texts) <= 1 and not any(_SEQUENCES in text for text in texts)
