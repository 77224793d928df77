#!/bin/sh
# Writes requirements/*.txt anew: every package pinned and hashed, for Python 3.11 to 3.13.
set -eu
cd "$(dirname "$0")/.."
lock() { uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-emit-index-url --no-emit-find-links --no-annotate "$@"; }
lock pyproject.toml --extra tracing -o requirements/adapter.txt
lock pyproject.toml --extra embedded --extra bench --extra tracing --group test --group ship --group check --group examples --group build --group protos -o requirements/dev.txt
lock pyproject.toml --group train -o requirements/train.txt
# for the images, which have no use for what the project itself needs
lock --group build -o requirements/build.txt
lock --group triton-cpu --no-deps -o requirements/triton-cpu.txt
