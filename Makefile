# Every target sets up what it needs. Start with `make demo` and `make test`.
PYTHON ?= python3
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_WORKERS ?= 4# most tests wait for servers, so more than the cores
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
PARALLEL = -n $(TEST_WORKERS) --dist worksteal
# The tests of `make test`; the marks are described in pyproject.toml.
QUICK = not (alone or browser or clients or e2e or postgres or slow)

.DEFAULT_GOAL := help
.PHONY: help venv clients demo demo-real test test-rest test-all test-lowest check e2e bench constraints docs manifests clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

venv: ## set up .venv (once; again when pyproject.toml changes)
	@sh deploy/venv.sh "$(PYTHON)" "$(VENV)"

clients: venv ## set up the real clients, the browser and Helm that `make test-all` runs, each in an environment of its own (once)
	@sh deploy/clients.sh "$(VENV)"
	@sh deploy/browser.sh "$(VENV)"
	@sh deploy/helm.sh "$(VENV)"

demo: venv ## an unmodified agent gets better, on real vLLM; SEED=2 changes the seed
	@$(BIN)/ratchet demo --seed $(SEED) $(DEMO_ARGS)

demo-real: venv ## a real pretrained model learns, on real vLLM; SEED=2 changes the seed, DEMO_ARGS="--dtype bfloat16" the format
	@$(BIN)/ratchet demo --real --seed $(SEED) $(DEMO_ARGS)

test: venv ## every component and one short end-to-end run on the real vLLM: about 4 minutes on 2 idle cores
	@$(PYTEST) -m "circle or $(QUICK)" $(PARALLEL)

test-rest: clients ## what `make test` leaves out: the plug-ins, real clients, Chromium, PostgreSQL, kills, timing, all end-to-end tests
	@$(PYTEST) -m "not ($(QUICK) or alone or e2e)" $(PARALLEL)
	@$(PYTEST) plugins -m "not (alone or e2e)" $(PARALLEL)
	@$(PYTEST) tests plugins -m "(alone or e2e) and not circle"

test-all: ## every test: about 40 minutes on 2 idle cores
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

test-lowest: venv ## proxy, store and command line with the lowest versions that pyproject.toml allows, without torch
	@TEST_WORKERS=$(TEST_WORKERS) sh deploy/lowest.sh "$(VENV)"

check: venv ## lint, format, types, import contracts, words, documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(PYTEST) -q tests/test_house.py tests/test_documents.py tests/test_words.py plugins/test_plugins.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

e2e: clients ## only the end-to-end tests on the real vLLM
	@$(BIN)/python -m pytest -m e2e

bench: venv ## compare the proxy with a bare proxy and LiteLLM, measure linking, and let two machines fail
	@$(BIN)/python -m benchmarks.proxy_overhead
	@$(BIN)/python -m benchmarks.linking
	@$(BIN)/python -m benchmarks.linking_memory --trajectories 1000
	@$(BIN)/python -m benchmarks.partitions --quick

constraints: venv ## write deploy/constraints.txt: the versions in .venv, with hashes
	@sh deploy/constraints.sh "$(VENV)"

docs: venv ## rewrite the pages that are generated from code
	@$(BIN)/python -m tests.harness.reference_docs

manifests: venv ## rewrite deploy/k8s from the Helm chart, and the settings in the chart's schema
	@sh deploy/helm.sh "$(VENV)"
	@$(BIN)/python -m tests.harness.helm

clean: ## remove the environment, caches and the demo's state
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist *.egg-info .ratchet/demo .ratchet/demo-real
