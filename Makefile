# Everything here needs Python 3.11 or later (with its venv module) and make, nothing else: the first target that
# runs makes a virtual environment in .venv. `make PYTHON=/path/to/python test` makes it from another Python.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
GPU_VENV := .venv-gpu
GPU_INSTALLED := $(GPU_VENV)/.installed
GPU_INDEX :=
NVIDIA_SMI := nvidia-smi
# Not that of planners: it needs a copy of their repositories.
BENCHMARKS := $(sort $(filter-out benchmarks/_% benchmarks/planners.py,$(wildcard benchmarks/*.py)))

# The first of these that runs, is recent enough and can make a virtual environment.
PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(shell $(name) -c \
	'import ensurepip, sys, venv; print("$(name)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))

# One thread for each process: the processes are the parallelism, and figures do not depend on the number of cores.
export OMP_NUM_THREADS := 1

.PHONY: help demo test test-processes test-programs test-others test-long durations coverage property-tests zoo docs lint versions wheel bench gpu clean

help:
	@echo "make demo    train a small GPT on two processes and compare it with one device"
	@echo "make test    lint, and some tests of every kind"
	@echo "make test CHANGED=1   of these, the tests that the changes of this branch can reach"
	@echo "make test-long   all other tests"
	@echo "make durations   all tests, and how long each takes, which decides what is long"
	@echo "make coverage    as make test, and which part of the code it runs; fails below the floor in pyproject.toml"
	@echo "make property-tests   thousands of random programs"
	@echo "make versions   some tests with other releases of Python, torch and Lightning; downloads about 3 GB for each"
	@echo "make zoo     train all kinds of modules at all levels, and write docs/zoo.md"
	@echo "make docs    run the tutorial's commands and the notebook, build the documentation into build/site"
	@echo "make lint    ruff, its formatter, mypy, and the rules of plain English that can be counted"
	@echo "make wheel   build the package, install it into a new environment, and run the README's example there"
	@echo "make bench   all benchmarks"
	@echo "make gpu     on a machine with an NVIDIA GPU: tests and comparisons on it, and a report of them in build/gpu"
	@echo "make clean   remove the virtual environment and the tools' caches"

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

# At once: tests that start processes of their own, those of programs, all others, and at first lint. They are three so that two cores
# have work until the end. What is marked as long is more of the kinds that are here.
test: $(INSTALLED)
	@$(if $(COVERAGE),rm -rf build/coverage)
	@$(MAKE) -j4 $(SYNCED) --no-print-directory lint test-processes test-programs test-others
	@$(if $(COVERAGE),$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report)

# With CHANGED=1, only test files that the changes of this branch can reach; with CHANGED=<commit>, those since it.
export PIPER_CHANGED := $(CHANGED)
# With COVERAGE=1 the tests are measured, which makes them slower by about a half.
MEASURED := $(if $(COVERAGE),-m coverage run)
PROCESSES := tests/strategy tests/distributed tests/machines property_tests/mutations
PROGRAMS := tests/directives tests/search tests/zoo $(wildcard property_tests/test_*.py)
MARKED := not long
SYNCED := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

test-processes:
	$(BIN)/python $(MEASURED) -m pytest -m "$(MARKED)" $(PROCESSES)

test-programs:
	$(BIN)/python $(MEASURED) -m pytest -m "$(MARKED)" $(PROGRAMS)

test-others:
	$(BIN)/python $(MEASURED) -m pytest -m "$(MARKED)" $(foreach path,$(PROCESSES) $(PROGRAMS),--ignore $(path))

# With PIPER_ONE_OF_EACH=1, one case of each, see tests/durations.py.
test-long: $(INSTALLED)
	@$(MAKE) -j3 $(SYNCED) --no-print-directory test-processes test-programs test-others MARKED=long

durations: $(INSTALLED)
	@PIPER_RECORD_DURATIONS=1 $(MAKE) -j3 $(SYNCED) --no-print-directory test-processes test-programs test-others MARKED="long or not long"

coverage:
	@$(MAKE) --no-print-directory test COVERAGE=1

property-tests: $(INSTALLED)
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest property_tests --timeout 3600

zoo: $(INSTALLED)
	$(BIN)/python -m tests.zoo.page

docs: $(DOCS_INSTALLED)
	$(BIN)/python -m tests.tutorial
	$(BIN)/python -m tests.notebook
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict  # --quiet would not count warnings

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m tests.prose lightning_piper lightning_piper_cli benchmarks examples

versions: $(INSTALLED)
	$(BIN)/python -m tests.versions

wheel: $(INSTALLED)
	$(BIN)/python -m tests.wheel

bench: $(INSTALLED)
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

# With a build of torch for CUDA, in a virtual environment of its own: that of PyPI, or of the index that GPU_INDEX names, such as
# https://download.pytorch.org/whl/cu130. At most eight minutes, once it is installed.
gpu:
	@$(NVIDIA_SMI) -L >/dev/null 2>&1 || { echo "make gpu: $(NVIDIA_SMI) finds no NVIDIA GPU here; nothing was installed or run" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(GPU_INSTALLED)
	$(GPU_VENV)/bin/python -m tests.gpu.report

clean:
	rm -rf $(VENV) $(GPU_VENV) build/site build/coverage build/gpu .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch comes first and by itself, at the pinned version: resolving the other packages must not choose another build.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with its venv module found" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install $(shell grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,dev]"
	@touch $@

$(GPU_INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with its venv module found" >&2; exit 1; }
	$(GPU_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install $(if $(GPU_INDEX),--index-url $(GPU_INDEX)) $(shell grep '^torch==' constraints.txt)
	@$(GPU_VENV)/bin/python -c "import sys, torch; sys.exit(torch.version.cuda is None and \
		f'make gpu: torch {torch.__version__} is built without CUDA; give GPU_INDEX=https://download.pytorch.org/whl/cu130')"
	$(GPU_VENV)/bin/python -m pip install -c constraints.txt -e ".[test]"
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	@touch $@
