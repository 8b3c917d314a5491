# Everything that a newcomer needs: `make demo`, then `make test`.
#
# A fresh machine needs Python 3.10 or newer, make and a package index; both commands build .venv
# on their first run and reuse it afterwards. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed

# For example: make test PYTEST_FLAGS="-x -k sqlite"
PYTEST_FLAGS ?=

# Tests start hundreds of processes. Where the environment forbids bytecode caches, each of them
# would compile torch and elastic anew, which doubles the time until it runs.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test lint pytest chaos test-gpu docs proto install clean

help:  ## say what there is
	@awk -F ":.*## " '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: $(INSTALLED)  ## train on a small cluster, kill parts of it, and watch it go on
	@$(BIN)/python examples/demo.py

test: lint pytest  ## all checks and tests, ten minutes on two cores

# Each check says how long it took; pytest prints its own table of seconds by part.
define check
	@start=$$(date +%s); $(1) || { echo "failed: $(1)" >&2; exit 1; }; \
	echo "$$(( $$(date +%s) - start )) s  $(1)"
endef

lint: $(INSTALLED)  ## style, format and types
	$(call check,$(BIN)/ruff check --quiet .)
	$(call check,$(BIN)/ruff format --quiet --check .)
	$(call check,$(BIN)/mypy --no-error-summary)

# Tests of one file are one process's: they share clusters and other fixtures. Where twenty tests
# fail, others would, too.
pytest: $(INSTALLED)  ## the tests without the checks
	@$(BIN)/python -m pytest -m "not slow and not gpu" -n logical --dist loadfile \
		--no-loadscope-reorder --durations 10 --maxfail 20 $(PYTEST_FLAGS) tests

chaos: $(INSTALLED)  ## the tests that take minutes or hours
	@$(BIN)/python -m pytest -m slow $(PYTEST_FLAGS) tests
	@ELASTIC_TEST_EFFORT=20 $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/property

test-gpu: $(INSTALLED)  ## the tests that need CUDA devices
	@$(BIN)/python -m pytest -m gpu $(PYTEST_FLAGS) tests

docs: $(DOCS_INSTALLED)  ## build the pages of docs/ into build/docs; a warning is an error
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

proto: $(INSTALLED)  ## make elastic/wire/generated anew from proto/
	@$(BIN)/python scripts/gen_proto.py

install: $(INSTALLED)  ## build .venv, and nothing else

# The stamp is written last: an install that was interrupted is taken up again. Python compiles what
# is imported; the rest of the packages, half a minute's work, need not be.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time takes a few minutes, most of it PyTorch)"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
		-c constraints.txt -e ".[test]"
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

clean:  ## remove what runs and tools left behind, .venv included
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
