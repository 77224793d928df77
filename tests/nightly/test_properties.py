"""The property tests of `make test`, which plays the same examples each time, with others."""

import itertools
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_properties_hold_for_examples_that_nobody_has_seen(seconds, seed):
    """In rounds, each with a seed of its own; a round that has begun ends."""
    end = time.monotonic() + seconds
    for number in itertools.count(seed):
        options = ["--hypothesis-profile=random", f"--hypothesis-seed={number}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis and not nightly", *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if time.monotonic() >= end:
            sys.stdout.write(f"seeds {seed} to {number}\n")
            return
