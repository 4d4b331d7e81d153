# Every target sets up what it needs. `make demo` and `make test` are the two that a newcomer wants.
PYTHON ?= python3
SEED ?= 1
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TESTS_AT_ONCE ?= 4

.DEFAULT_GOAL := help
.PHONY: help venv clients demo test check e2e bench docs clean

help: ## list the targets
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 10

venv: ## set up .venv (once; again when pyproject.toml changes)
	@sh deploy/venv.sh "$(PYTHON)" "$(VENV)"

clients: venv ## set up the real clients that the tests run, in environments of their own, and a browser (once)
	@sh deploy/clients.sh "$(VENV)"
	@sh deploy/browser.sh "$(VENV)"

demo: venv ## an unmodified agent gets better, on real vLLM; SEED=2 changes the seed
	@$(BIN)/ratchet demo --seed $(SEED) $(DEMO_ARGS)

test: clients ## every test: most side by side (they mostly wait), then those that measure time and the real vLLM's by themselves
	@TESTS_AT_ONCE=$(TESTS_AT_ONCE) $(BIN)/python -m tests.suite

check: venv ## lint, format, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

e2e: clients ## only the tests on the real vLLM
	@$(BIN)/python -m pytest -m e2e

bench: venv ## measure the proxy beside a floor and LiteLLM's proxy, and how well calls are linked
	@$(BIN)/python -m benchmarks.proxy_overhead
	@$(BIN)/python -m benchmarks.linking

docs: venv ## rewrite what is made from code: docs/commands.md
	@$(BIN)/python -m tests.house

clean: ## remove the environment, caches and the demo's state
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist *.egg-info .ratchet/demo
