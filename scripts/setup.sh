#!/bin/sh
# Makes .venv with exactly the locked packages. Needs Python 3.11+ with venv; does nothing when up to date.
#   PYTHON=python3.12 scripts/setup.sh    to choose the interpreter
set -eu
cd "$(dirname "$0")/.."

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }
if [ -z "${PYTHON:-}" ]; then
  # The embedded Triton runs Python models on 3.11 and 3.12, so these come first.
  for PYTHON in python3.12 python3.11 python3 python3.13; do usable "$PYTHON" && break; done
fi
usable "$PYTHON" || { echo "setup: needs Python 3.11, 3.12 or 3.13 with the venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }

# `done_before NAME WANT`: was this step done before, for just this? `note NAME WANT`: now it is.
done_before() { [ "$(cat ".venv/.$1" 2>/dev/null)" = "$2" ]; }
note() { printf '%s' "$2" > ".venv/.$1"; }

lock="$("$PYTHON" -V) $(cat requirements/dev.txt scripts/setup.sh | cksum)"
project="$(cksum < pyproject.toml)"

if ! done_before packages "$lock"; then
  echo "setup: installing the locked packages into .venv with $("$PYTHON" -V) (about a minute)" >&2
  rm -rf .venv
  "$PYTHON" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/dev.txt
  PYTHONPATH=. .venv/bin/python scripts/libpython.py
  note packages "$lock"
fi
if ! done_before project "$project"; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
  note project "$project"
fi
