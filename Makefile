# Two commands are all there is to know: `make demo` and `make test`.
# Each makes .venv first, with pip; CI runs the same lines. On a GPU: `make gpu-check`.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint check unit bench gpu-check clean

demo: .venv/ready
	$(BIN)/swapd demo

test: lint check unit

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: .venv/ready
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: .venv/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

bench: .venv/ready
	$(BIN)/swapd bench

# Everything that only a GPU can show, with the Python that is named: no .venv, no network.
# make gpu-check PYTHON=python3 CHECK='--only probe --out /tmp/results'
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(CHECK)

# torch first and by its exact version, so that nothing below picks another build of it
.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "swapd needs Python 3.11 to 3.13; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
