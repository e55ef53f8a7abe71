# Two commands are all there is to know: `make demo` and `make test`.
# Each makes .venv first, with pip; CI runs the same lines. On a GPU: `make gpu-check`.
# `make test-vllm` makes .venv-vllm (2 GB) and runs real vLLM engines; CI runs it too.

PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv-vllm/bin

.PHONY: demo test test-vllm lint check unit bench gpu-check clean

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

# make test-vllm TESTS='tests/vllm/test_deploy.py -k overlay'
# make test-vllm ISA=avx2, for what a CPU without AVX-512 would do
TESTS ?= tests/vllm
ISA ?=
test-vllm: .venv-vllm/ready
	env -u PYTHONDONTWRITEBYTECODE TESTS_VLLM_ISA=$(ISA) $(VLLM)/python -m pytest $(TESTS)

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

# Never skipped: without it nothing shows that swapd works with vLLM.
.venv-vllm/ready: tests/vllm/requirements.txt pyproject.toml
	@$(MAKE) --no-print-directory install-vllm || { \
	  echo "*** NOT TESTED: the environment with vLLM could not be installed (see above) ***" >&2; \
	  exit 1; }
	touch $@

.PHONY: install-vllm
install-vllm:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the CPU build of vLLM needs Python 3.11; name one: make test-vllm PYTHON=python3.11")'
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement tests/vllm/requirements.txt
	$(VLLM)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	VLLM_TARGET_DEVICE=cpu $(VLLM)/python -m tests.vllm.kernels

clean:
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
