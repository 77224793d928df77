"""Failed inferences whose text may be a caller's: which of them are 507 more than once."""

import json
from pathlib import Path

import pytest

from adapter.core.evidence import Suspicion
from adapter.core.memory import HOST, Device
from adapter.errors import InferenceFailed, MemoryFigures, OutOfMemory

GIB = 2**30
GPU, OTHER = Device("GPU-0"), Device("GPU-1")
CUDA = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
NUMPY = "MemoryError: Unable to allocate 2.00 GiB for an array"
DATA = Path(__file__).parents[2] / "data"


def ask(doubt, text=CUDA, needed=2 * GIB, *, free=None, is_alone=False):
    error = OutOfMemory(text, model_id="m", figures=MemoryFigures(needed_bytes=needed))
    return doubt.judged(error, "key", free=free or {}, is_alone=is_alone)


def second(text=CUDA, needed=2 * GIB, **more):
    doubt = Suspicion()
    assert type(ask(doubt, text, needed, **more)) is OutOfMemory
    return type(ask(doubt, text, needed, **more))


@pytest.mark.parametrize(
    ("free", "kind"),
    [
        ({GPU: 8 * GIB}, InferenceFailed),
        ({GPU: 8 * GIB - 1}, OutOfMemory),
        ({GPU: 8 * GIB, OTHER: GIB}, OutOfMemory),  # which of them it is, nobody says
        ({GPU: 8 * GIB, HOST: GIB}, InferenceFailed),
        ({HOST: 80 * GIB}, OutOfMemory),  # says nothing of a GPU
        ({}, OutOfMemory),
    ],
)
def test_a_size_that_far_more_was_free_than_is_not_believed_twice(free, kind):
    assert second(free=free) is kind


@pytest.mark.parametrize(
    ("text", "free", "kind"),
    [
        (NUMPY, {HOST: 8 * GIB}, InferenceFailed),
        (NUMPY, {HOST: 7 * GIB}, OutOfMemory),
        (NUMPY, {GPU: 80 * GIB}, OutOfMemory),
        ("Failed to increase the shared memory pool size: 2 GiB", {HOST: 80 * GIB}, OutOfMemory),
    ],
)
def test_the_size_is_held_against_the_memory_that_the_text_is_about(text, free, kind):
    assert second(text, free=free) is kind


def test_a_text_without_a_size_is_believed_beside_others():
    assert second("std::bad_alloc", None, free={HOST: 80 * GIB}) is OutOfMemory


def test_what_is_said_again_and_again_with_nothing_else_loaded_is_not_believed():
    doubt = Suspicion()
    kinds = [type(ask(doubt, "std::bad_alloc", None, is_alone=True)) for _ in range(5)]
    assert kinds == [OutOfMemory] * 3 + [InferenceFailed] * 2


def test_why_it_was_not_believed_is_said():
    doubt = Suspicion()
    first, again = (ask(doubt, free={GPU: 80 * GIB}) for _ in range(2))
    assert str(first) == CUDA
    assert str(again) == f"{CUDA} (not taken for out of memory: far more was free than that)"
    assert (again.model_id, type(again.__cause__)) == ("m", OutOfMemory)


@pytest.mark.parametrize("file", sorted(DATA.glob("*.jsonl")), ids=lambda file: file.name)
def test_a_models_first_failure_keeps_its_label_whatever_was_free(file):
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    for text in texts:
        found = ask(Suspicion(), text, 1, free={GPU: 80 * GIB, HOST: 80 * GIB})
        assert type(found) is OutOfMemory
