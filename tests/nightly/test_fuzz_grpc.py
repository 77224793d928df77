"""The fuzz tests of the relay of gRPC calls, with other examples each time."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUZZ = "tests/frontends/grpc/test_proxy_fuzz.py"
EXAMPLES = 30  # of each test in a round, which then takes under a minute


def test_relay_survives_frames_that_nobody_has_seen(seconds, seed):
    """Play rounds, each with a seed of its own; a round that has begun ends."""
    end = time.monotonic() + seconds
    for number in itertools.count(seed):
        options = ["--hypothesis-profile=random", f"--hypothesis-seed={number}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "0", FUZZ, *options],
            cwd=ROOT,
            env=os.environ | {"LANE_FUZZ_EXAMPLES": str(EXAMPLES)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if time.monotonic() >= end:
            rounds = number - seed + 1
            sys.stdout.write(f"seeds {seed} to {number}: {rounds} rounds of {EXAMPLES} examples\n")
            return
