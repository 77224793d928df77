"""OpenAI's paths answer as docs/openapi.yaml says, whatever they are asked."""

from pathlib import Path
from shutil import copytree

import pytest

from tests.journeys.openai.models import write_classifier, write_embedder
from tests.openapi.playing import phases, play
from tests.running import COMPLETE, EXAMPLES, embedded_adapter

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1100)]


def test_openai_paths_answer_as_described(tmp_path: Path):
    store = tmp_path / "store"
    write_embedder(store / "embed", salt="embed")
    write_classifier(store / "mood", labels=("calm", "glad", "sad"))
    copytree(EXAMPLES.parent / "gallery" / "text", store / "text")
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path / 'cache'}", "--on-demand")
    bounded = ("--generation-deterministic", "--max-examples=20", "--include-tag=openai")
    with embedded_adapter(*flags, COMPLETE) as adapter:
        play(adapter.http, tmp_path, *bounded, phases("examples", "coverage", "fuzzing"))
