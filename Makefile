# Every target sets up what it needs in .venv. Needs Python 3.11+ (with venv), pip and make.
PYTEST ?= .venv/bin/pytest
MINUTES ?= 90
# more than two cores: tests of a real Triton mostly wait, the quick ones less
WORKERS ?= 5
unit: WORKERS = 3
# where the quick tests are; all others need a Triton, or what only a run of everything is worth
QUICK = tests/unit tests/control tests/backend tests/dataplane tests/frontends \
  tests/contract/test_doubles.py tests/journeys/modelmesh tests/test_architecture.py tests/test_docs.py
HTTP ?= 127.0.0.1:8080
ADMIN ?= 127.0.0.1:8081
GRPC ?= 127.0.0.1:8085

# Compiled code is kept: to compile tests and adapter anew takes each process seconds.
test unit nightly: export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup run demo test unit nightly test-gpu e2e bench check fix lock docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with the locked packages (done by every other target)
	@scripts/setup.sh

run: setup  ## serve on a Triton of our own, with the example models; prints lines to paste
	@exec .venv/bin/triton-adapter serve --triton=embedded --examples --http=$(HTTP) --admin=$(ADMIN) \
	  --grpc=$(GRPC) \
	  --triton-http=127.0.0.1:0 --triton-grpc=127.0.0.1:0 --triton-metrics=127.0.0.1:0 --log-format=text

demo: setup  ## a guided tour: load, invoke, a real out of memory, the eviction that heals it
	@exec .venv/bin/triton-adapter demo

test: setup  ## the whole test suite, against a real Triton; a file of tests stays in one process
	$(PYTEST) -n $(WORKERS) --dist loadfile -m 'not nightly and not gpu and not e2e'

unit: setup  ## the quick tests, before no Triton
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not triton and not slow and not nightly' $(QUICK)

nightly: setup  ## the long tests; MINUTES=90 are shared out among PARTS, which are all if not given
	.venv/bin/python -m tests.nightly --minutes=$(MINUTES) $(PARTS)

test-gpu:  ## what needs a GPU; needs no .venv: PYTEST='python3 -m pytest' does
	$(PYTEST) -m gpu tests/gpu

e2e: setup  ## build the images, run compose.yaml and play with it; needs a container engine
	$(PYTEST) -m e2e tests/e2e

bench: setup  ## measure against the targets, 20 minutes; BENCH=--quick tries it, 3; BENCH='start churn' some
	.venv/bin/python -m tests.benchmarks $(BENCH)

check: setup  ## format, lint, types, import layers, docs up to date; writes nothing
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	.venv/bin/python scripts/gen_docs.py --check
	.venv/bin/python scripts/gen_chart_readme.py --check
	.venv/bin/python scripts/gen_protos.py --check

fix: setup  ## format, and mend what the linter can
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

docs: setup  ## write the generated pages of docs/ anew
	.venv/bin/python scripts/gen_docs.py
	.venv/bin/python scripts/gen_chart_readme.py

lock: setup  ## pin the newest allowed versions in requirements/ (needs uv)
	scripts/lock.sh

clean:  ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
