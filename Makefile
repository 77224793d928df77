# Every target sets up what it needs in .venv. Needs Python 3.11 or 3.12 (with venv) and make;
# PYTHON=... names the interpreter.
PYTEST ?= .venv/bin/pytest
MINUTES ?= 90
SECONDS ?= 60
# `make test TRITON=/opt/tritonserver/bin/tritonserver`: on that one, what needs a Triton
TRITON := $(or $(TRITON),$(TRITON_SERVER))
# those of `make load`, in this order
SCENARIOS ?= sagemaker v2_rest v2_grpc endpoint loads
USERS ?= 8
# more than two cores: tests of a real Triton mostly wait, the quick ones less
WORKERS ?= 7
# where the quick tests are; all others need a Triton, or what only a run of everything is worth.
# Each part is a process, which collects its own tests alone: for workers each would collect all.
QUICK_pure = tests/unit
QUICK_control = tests/control
QUICK_http = tests/frontends/http tests/frontends/test_held_errors.py tests/test_architecture.py
QUICK_grpc = tests/frontends/grpc tests/contract/test_doubles.py tests/journeys/modelmesh
QUICK_triton = tests/triton tests/test_docs.py
QUICK_PARTS = pure control http grpc triton
QUICK = $(foreach part,$(QUICK_PARTS),$(QUICK_$(part)))
# where `make run` listens: also of the environment, as for every command
ADAPTER_HTTP ?= 127.0.0.1:8080
ADAPTER_ADMIN ?= 127.0.0.1:8081
ADAPTER_GRPC ?= 127.0.0.1:8085
ADAPTER_MODEL_STORE ?= store
ADAPTER_CACHE_DIR ?= .venv/cache
HTTP ?= $(ADAPTER_HTTP)
ADMIN ?= $(ADAPTER_ADMIN)
GRPC ?= $(ADAPTER_GRPC)

# Compiled code is kept: to compile tests and adapter anew takes each process seconds.
test unit nightly: export PYTHONDONTWRITEBYTECODE =
test: export TRITON_SERVER := $(TRITON)

.PHONY: help setup setup-run setup-demo run demo test unit load coverage nightly test-gpu e2e fleet pictures bench simulate simulation check release-dry-run fix lock style docs site clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with what development needs (done by every other target)
	@scripts/setup.sh

setup-run:
	@scripts/setup.sh run

run: setup-run  ## serve on a Triton of our own, with the example models and the folder `store` as an endpoint; prints lines to paste; HTTP=127.0.0.1:9080, ADMIN=, GRPC=: at other ports
	@[ "$(ADAPTER_MODEL_STORE)" != store ] || mkdir -p store
	@exec .venv/bin/triton-adapter serve --triton=embedded --examples --model-store=$(ADAPTER_MODEL_STORE) --cache-dir=$(ADAPTER_CACHE_DIR) \
	  --http=$(HTTP) --admin=$(ADMIN) --grpc=$(GRPC) \
	  --triton-http=127.0.0.1:0 --triton-grpc=127.0.0.1:0 --triton-metrics=127.0.0.1:0 --log-format=text

setup-demo:
	@scripts/setup.sh demo

demo: setup-demo  ## a guided tour: out of memory and the eviction that heals it; a bucket, and boto3
	@exec .venv/bin/python examples/demo/demo.py

test: setup  ## what every change must pass, against a real Triton; TRITON=/path/to/tritonserver: on another
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -m 'not nightly and not gpu and not e2e' \
	  $(if $(TRITON),tests/contract tests/journeys)

.venv-load/installed: requirements/load.txt
	.venv/bin/python -m venv --clear .venv-load
	.venv-load/bin/pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r $<
	@touch $@

load: setup-run .venv-load/installed  ## Locust against `make run`: each of SCENARIOS for SECONDS=60 with USERS=8 callers (examples/load)
	@curl --silent --fail --output /dev/null http://$(HTTP)/ping || \
	  { echo "no adapter answers at http://$(HTTP): start one in another terminal with 'make run', or name it by HTTP=HOST:PORT GRPC=HOST:PORT"; exit 2; }
	@failed=; for scenario in $(SCENARIOS); do \
	  printf '\n== examples/load/%s.py, %s s\n' $$scenario $(SECONDS); \
	  case $$scenario in v2_grpc) host=grpc://$(GRPC) ;; *) host=http://$(HTTP) ;; esac; \
	  .venv-load/bin/locust --locustfile examples/load/$$scenario.py --host $$host --headless --only-summary \
	    --users $(USERS) --spawn-rate $(USERS) --run-time $(SECONDS)s --loglevel WARNING || failed="$$failed $$scenario"; \
	done; [ -z "$$failed" ] || { echo "with failures:$$failed"; exit 1; }

unit: setup  ## the quick tests, before no Triton
	@.venv/bin/triton-adapter --version
	@$(MAKE) --silent --keep-going --jobs=6 --output-sync $(addprefix quick-,$(QUICK_PARTS))

quick-%:
	$(PYTEST) -q -n 0 --hypothesis-profile=few -m 'not triton and not slow and not nightly' $(QUICK_$*)

coverage: setup  ## branches of core, control, packages, protocols and http2 that the quick tests take: 95 % at least
	.venv/bin/python -m coverage run -m pytest -q -n 0 -m 'not triton and not slow and not nightly' $(QUICK)
	.venv/bin/python -m coverage report

nightly: setup  ## the long tests; MINUTES=90 are shared out among PARTS, which are all if not given
	.venv/bin/python -m tests.nightly --minutes=$(MINUTES) $(PARTS)

test-gpu:  ## what needs a GPU; needs no .venv: PYTEST='python3 -m pytest' does
	$(PYTEST) -m gpu tests/gpu

pictures: setup  ## take those of docs/images anew: the page in a Chromium, and `ps --watch`
	PICTURES=docs/images $(PYTEST) -q -n 0 tests/journeys/page/test_pictures.py

fleet: setup  ## a hundred models on three machines behind Envoy: measure, and write their figures into docs/measurements.md
	FLEET_FIGURES=1 $(PYTEST) -q -n 0 -s -m nightly tests/fleet/test_hundred_models.py

e2e: setup  ## build the images, run compose.yaml and play with it; needs a container engine
	$(PYTEST) -m e2e tests/e2e

sbom: setup  ## write dist/triton-adapter.cdx.json, what the images have beside their bases (CycloneDX)
	@scripts/sbom.sh

release-dry-run: setup  ## build what a release publishes into dist/release and try it; publishes nothing; TAG=v0.1.0 checks the tag, STEPS='chart site' does some
	@.venv/bin/python scripts/release.py $(if $(TAG),--tag=$(TAG)) $(STEPS)

bench: setup  ## measure against the targets, 10 minutes; BENCH=--quick tries it, 1; BENCH='rest churn' some; needs wrk, nginx, igzip and h2load of Debian
	.venv/bin/python -m tests.benchmarks $(BENCH)

check: setup site  ## format, lint, types, import layers, docs up to date and without a dead link; changes no file
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache
	.venv/bin/python scripts/check_style.py
	.venv/bin/python scripts/gen_docs.py --check
	.venv/bin/python scripts/gen_chart_readme.py --check
	.venv/bin/python scripts/gen_protos.py --check

fix: setup  ## format, and fix what the linter can
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

style: setup  ## write scripts/style_counts.json anew, after counts of check_style.py have fallen
	.venv/bin/python scripts/check_style.py --write

docs: setup  ## write the generated pages of docs/ anew
	.venv/bin/python scripts/gen_docs.py
	.venv/bin/python scripts/gen_chart_readme.py

simulate: setup  ## a year of production in virtual time: new seeds for SECONDS=60, or one (SEED=7)
	.venv/bin/python -m tests.simulation --seconds=$(SECONDS) $(if $(SEED),--seed=$(SEED)) $(if $(FIRST),--first=$(FIRST))

simulation: setup  ## simulate evictions: the table and data of docs/measurements.md, some minutes
	.venv/bin/python -m scripts.simulation.eviction

site: setup  ## write the documentation to dist/site, with search; fails on a dead link or anchor
	@.venv/bin/python scripts/lay_out_site.py
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

lock: setup  ## pin the newest allowed versions in requirements/ (needs uv)
	scripts/lock.sh

clean:  ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
