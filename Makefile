# Three commands: `make demo`, `make test` and `make docs`. All install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread per process: two torch threads on a busy two-core machine are slower than one.
export OMP_NUM_THREADS ?= 1
export MPLBACKEND := Agg

.PHONY: demo test test-all docs venv browser lint types layers tests fuzz clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   install into .venv and run the main job on data the package makes itself"
	@echo "make test   install and run lint, types, import layers, doctests and quick tests"
	@echo "make test-all  the same with the slow tests"
	@echo "make docs   build the documentation with its examples into docs/_build/html"
	@echo "make fuzz   thousands of damaged tables, images and models (slow); SEED=7 damages them in other places"
	@echo "make venv   install only"
	@echo "make browser try to install Chromium, in which the report is tested"
	@echo "make clean  remove .venv, caches and the demo's output"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("equipool needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv
	$(BIN)/equipool demo --out equipool-demo --force

test: lint types layers tests

test-all: lint types layers browser
	$(BIN)/python -m pytest -m 'not fuzz'

# -W: a warning fails the build. Nothing is downloaded.
docs: venv
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "Documentation: docs/_build/html/index.html"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

layers: venv
	$(BIN)/lint-imports

# The report's tests want a browser; where there is none and none can be had, they skip and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get install -y -q chromium >/dev/null 2>&1; } \
	  || echo "No Chromium here: the browser tests of the report will be skipped."

tests: venv browser
	$(BIN)/python -m pytest

SEED ?= 0
fuzz: venv
	EQUIPOOL_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -m fuzz tests/fuzz

clean:
	rm -rf $(VENV) equipool-demo docs/_build docs/auto_examples .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
