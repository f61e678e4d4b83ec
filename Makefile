# `make demo` and `make test` are all that a newcomer needs; both set up .venv first.
BIN := .venv/bin
STAMP := .venv/.setup-done
PYTEST := $(BIN)/python -m pytest
# Two processes of tests where there is memory for both, engines included.
JOBS ?= $(shell awk '/MemAvailable/ {print ($$2 > 16000000) ? 2 : 1}' /proc/meminfo 2>/dev/null || echo 1)
SIDE_BY_SIDE := $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

.PHONY: help setup demo test test-ranks test-stages test-fast bench docs docs-output lint clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv with everything in it (once; again when pyproject.toml changes)
	@:

$(STAMP): pyproject.toml tools/setup_venv.py
	@py=; for c in python3.11 python3; do \
	  if $$c -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then py=$$c; break; fi; done; \
	if [ -z "$$py" ]; then \
	  echo "insitu's development setup needs Python 3.11 (vLLM's CPU build is tested with it here)."; \
	  echo "Neither 'python3.11' nor 'python3' is one. Install it (apt install python3.11-venv, uv python"; \
	  echo "install 3.11, pyenv install 3.11 ...), put it on PATH, and run this again."; exit 1; fi; \
	$$py tools/setup_venv.py && touch $@

demo: setup  ## a walkthrough with a small real model on the CPU
	@$(BIN)/python -m insitu.walkthrough

test: setup lint  ## everything that needs no GPU (JOBS=1: in one process)
	@$(PYTEST) -m "not gpu" $(SIDE_BY_SIDE)
	@$(MAKE) --no-print-directory test-ranks

test-ranks: setup  ## the engine's tests on two ranks, each a process of its own
	@$(PYTEST) tests/engine --engine two-ranks -m "not gpu and not in_process"

test-stages: setup  ## the same on two stages of a pipeline
	@$(PYTEST) tests/engine --engine two-stages -m "not gpu and not in_process"

test-fast: setup  ## the tests that take seconds
	@$(PYTEST) -m "not gpu and not slow"

bench: setup  ## what insitu costs beside plain vLLM
	@$(BIN)/python -m benchmarks

docs: setup  ## build the pages into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "built site/index.html"

docs-output: setup  ## run the pages' code again and write down what it prints
	@$(BIN)/python tools/update_docs_output.py

lint: setup  ## ruff and pyright
	@$(BIN)/ruff check src tests tools benchmarks
	@$(BIN)/ruff format --check --quiet src tests tools benchmarks
	@$(BIN)/pyright --warnings

clean:  ## remove what was built, .venv included
	rm -rf .venv site dist build outputs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
