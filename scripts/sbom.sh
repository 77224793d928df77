#!/bin/sh
# Writes dist/triton-adapter.cdx.json, a software bill of materials (CycloneDX): the adapter, and the packages that it has
# beside it in the images `adapter` and `sagemaker`, with versions, licences and who needs whom. They are installed
# into a folder that is removed again. SOURCE_DATE_EPOCH becomes its time; without one it has none.
# What the base images hold is not in it: a builder says that, as .github/workflows/release.yaml asks it to.
set -eu
cd "$(dirname "$0")/.."
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m venv --without-pip "$folder"
.venv/bin/python -m pip --python "$folder/bin/python" install --quiet --disable-pip-version-check --no-compile \
  --no-deps --require-hashes -r requirements/adapter.txt
mkdir -p dist
.venv/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
  --output-file dist/triton-adapter.cdx.json "$folder/bin/python"
