"""Runs the long tests, part by part: `python -m tests.nightly --minutes=90 [PART...]`.

Each part has its share of the minutes (`SHARES`) and a seed, which is printed. A part that fails
does not keep the others from running; the exit code is 1 then.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What a part runs, and its minutes of 90. Parts outside tests/nightly take what they take; so do
# absent_names, envoy_gateway, first_contact, gallery, learned_sizes, load, modelmesh_full and
# mutants.
SHARES = {
    "readme": ("tests/docs", 2.0),
    "demo": ("tests/journeys/demo", 1.0),
    "memory": ("tests/journeys/memory", 8.0),
    "packages": ("tests/packages", 3.0),
    "attack_grpc": ("tests/nightly/test_attack_grpc.py", 10.0),
    "triton_input": ("tests/nightly/test_triton_input.py", 5.0),
    "attack_cost": ("tests/nightly/test_attack_cost.py", 6.0),
    "learned_sizes": ("tests/nightly/test_learned_sizes.py", 1.0),
    "memory_oracle": ("tests/nightly/test_memory_oracle.py", 10.0),
    "blame": ("tests/nightly/test_blame.py", 3.0),
    "long_runs": ("tests/nightly/test_long_runs.py", 8.0),
    "alerts": ("tests/nightly/test_alerts.py", 8.0),
    "absent_names": ("tests/nightly/test_absent_names.py", 8.0),
    "killed": ("tests/nightly/test_killed.py", 5.0),
    "versitygw": ("tests/store/test_versitygw.py", 1.0),
    "envoy_gateway": ("tests/nightly/test_envoy_gateway.py", 2.0),
    "gateway_types": ("tests/chart/test_fleet.py", 1.0),
    "workflows": ("tests/images/test_release.py", 1.0),
    "first_contact": ("tests/nightly/test_first_contact.py", 6.0),
    "gallery": ("tests/nightly/test_gallery.py", 2.0),
    "load": ("tests/nightly/test_load.py", 2.0),
    "mutants": ("tests/nightly/test_mutants.py", 6.0),
    "endpoint_clients": ("tests/journeys/endpoint/test_clients.py", 3.0),
    "hundred_models": ("tests/fleet/test_hundred_models.py", 10.0),
    "v2": ("tests/journeys/v2", 2.0),
    "fuzz_http": ("tests/nightly/test_fuzz_http.py", 3.0),
    "sagemaker": ("tests/journeys/sagemaker", 6.0),
    "another_triton": ("tests/test_another_triton.py", 1.0),
    "modelmesh_full": ("tests/nightly/test_modelmesh_full.py", 12.0),
    "simulation": ("tests/nightly/test_simulation.py", 60.0),
    "openapi": ("tests/nightly/test_openapi.py", 4.0),
    "lowest_versions": ("tests/nightly/test_lowest_versions.py", 1.0),
    "openai": ("tests/nightly/test_openai.py", 3.0),
    "properties": ("tests/nightly/test_properties.py", 11.0),
}


def seconds_of(parts: list[str], minutes: float) -> dict[str, float]:
    """The minutes shared out in proportion."""
    total = sum(SHARES[part][1] for part in parts)
    return {part: 60 * minutes * SHARES[part][1] / total for part in parts}


def run(part: str, seconds: float, seed: int) -> bool:
    """Whether all of its tests passed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-s",
        "-m",
        "nightly",
        SHARES[part][0],
    ]
    environment = {"NIGHTLY_SECONDS": f"{seconds:.0f}", "NIGHTLY_SEED": str(seed)}
    return (
        subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode == 0
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make nightly", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(SHARES)}")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--seed", type=int, help="the same for each part; default: drawn")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(SHARES):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    parts = options.parts or list(SHARES)
    rows = []
    for part, seconds in seconds_of(parts, options.minutes).items():
        seed = options.seed or random.randrange(1, 10**6)
        sys.stdout.write(f"\n== {part}: {seconds:.0f} s, seed {seed}\n")
        sys.stdout.flush()
        began = time.monotonic()
        passed = run(part, seconds, seed)
        took = time.monotonic() - began
        rows.append(
            (passed, f"{part:17} {'passed' if passed else 'FAILED'} {took:6.0f} s, seed {seed}")
        )
    sys.stdout.write("\n" + "".join(f"{text}\n" for _, text in rows))
    return 0 if all(passed for passed, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
