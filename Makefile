# `make dev` and `make test` need Python ≥ 3.11 and make, nothing else.

# The first one that is new enough and can make a virtual environment; `make PYTHON=… dev` names another.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3 python; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help dev test coverage chaos check lint format docs bench build lock screenshots clean

help:  ## Show what there is to make
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

dev: $(STAMP)  ## Start everything on this machine
	@$(BIN)/perdure dev $(DEV_ARGS)

# Hundreds of processes start in the tests; none of them needs to compile again what another one has compiled.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)  ## Run all tests, against a real Temporal server
ifdef PYTEST_ARGS
	$(BIN)/pytest $(PYTEST_ARGS)
else
	@# Most tests wait for real processes to notice that others died, so there can be more of them than cores.
	$(BIN)/pytest -n 8 --dist worksteal -m "not alone and not slow"
	@# Those that hold a stopwatch have the machine to themselves.
	$(BIN)/pytest -m "alone and not slow"
endif

coverage: $(STAMP)  ## Measure which lines the tests of one process reach; processes that they start are not seen
	$(BIN)/pytest -n 4 --dist worksteal -m "not alone and not slow" --cov=perdure --cov=api --cov=activities \
		--cov=workflows --cov-report=term:skip-covered

chaos: $(STAMP)  ## Run the tests that take minutes each, then break things at random for a quarter of an hour
	$(BIN)/pytest -m slow
	@# Property tests with more examples than `make test` has time for, and with new ones each time.
	PERDURE_EXAMPLES=5 PERDURE_NEW_EXAMPLES=1 $(BIN)/pytest -m "not slow" --timeout 3600 tests/agents/test_output_schema.py \
		tests/api/test_refusals.py tests/api/test_strange_requests.py tests/harness/test_bad_text.py \
		tests/store/conformance/test_events.py tests/store/conformance/test_model.py
	PERDURE_MACHINE_EXAMPLES=500 $(BIN)/pytest tests/session_machine
	$(BIN)/python -m tests.chaos.soak --minutes 15

check: lint test  ## Everything that must hold before a commit

lint: $(STAMP) docs  ## Format, rules, types, architecture, and links of the docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.rooms
	$(BIN)/python -m tests.patches

format: $(STAMP)  ## Put the code in its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## Build the docs with the reference of what authors import, into site/
	@# Not with --quiet, which hides warnings from --strict, too. The variable turns off an advertisement of the theme.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## Measure
	$(BIN)/python -m bench $(BENCH_ARGS)

build: $(STAMP)  ## Build the wheel and the source archive
	$(BIN)/python -m build

screenshots: $(STAMP)  ## Take the pictures of the console in the docs
	$(BIN)/python -m tests.console.screenshots docs/images

# Names and versions only. What is installed from where is a matter of the machine.
lock: $(STAMP)  ## Write down the versions that are installed, for CI
	$(BIN)/python -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' > constraints.txt

clean:  ## Remove what was built; sessions under .perdure stay
	rm -rf $(VENV) dist build site .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Made anew whenever the dependencies may have changed.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Perdure needs Python 3.11 or newer with the venv module; name it: make PYTHON=/path/to/python dev" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "Making $(VENV) with $(PYTHON) …"; $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
