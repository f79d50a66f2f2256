# `make demo` and `make test` are all a fresh machine needs: each makes the virtual environment if it has to.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
STAMP := $(VENV)/.installed
SITE := $(VENV)/.docs
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test docs lint types layers pages compiled unit test-slow test-gpu cloud-test test-versions wheel release-check bench clean help

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# Said before anything is installed, and where pip's own words would not say what to do.
TOO_OLD := import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, and this is " \
  + sys.version.split()[0] + ": name another, as in `make test PYTHON=python3.13`")
NO_TORCH := import sys; sys.exit("torch cannot be installed for Python " + sys.version.split()[0] + ": if pip found no " \
  "matching distribution, torch has no wheel for it; run `make clean`, then `make test PYTHON=python3.13`")

# torch goes first: whatever follows finds its requirement met and brings no CUDA packages along.
$(STAMP): setup.cfg constraints.txt tools/torchvision_cpu_ops/setup.cfg tools/torchvision_cpu_ops/torchvision_cpu_ops.py
	@$(PYTHON) -c '$(TOO_OLD)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip setuptools
	$(INSTALL) -c constraints.txt torch torchvision || $(BIN)/python -c '$(NO_TORCH)'
	$(INSTALL) ./tools/torchvision_cpu_ops
	$(INSTALL) -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)  ## five acts with torch's loader and with ours, one table and one picture
	$(BIN)/python -m examples.demo

# Types are checked by one process. Meanwhile another compiles the tests, which each of the four that run them would do.
test: $(STAMP)  ## format, lint, types, layers, pages, tests
	@$(MAKE) --no-print-directory -j2 --output-sync types pages lint layers compiled
	@$(MAKE) --no-print-directory unit

# Torch, the package and what builds the site: less than tests need.
$(SITE): setup.cfg constraints.txt
	@$(PYTHON) -c '$(TOO_OLD)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip setuptools
	$(INSTALL) -c constraints.txt torch || $(BIN)/python -c '$(NO_TORCH)'
	$(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(SITE)  ## build the documentation site, strictly: build/site
	$(BIN)/python -m sphinx -n -W --keep-going -q -b html -d build/doctrees -c docs . build/site
	@echo 'the site is in build/site/index.html'

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports --no-cache

# All links and names of the site, without its files.
pages: $(STAMP)
	$(BIN)/python -m sphinx -n -W --keep-going -q -b dummy -d build/doctrees -c docs . build/site

compiled: $(STAMP)
	@-$(BIN)/python -m pytest --collect-only -q -n 0 -p no:cacheprovider > /dev/null 2>&1

# What will be skipped here, and why, is said first (`tests/missing_parts.py`).
# Five at a time on two cores: for half of the time a test waits for processes that it has started.
unit: $(STAMP)
	$(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder -m 'not slow and not cloud'

test-slow: $(STAMP)  ## the long tests: uniformity over 10,000 epochs, long soaks
	$(BIN)/python -m pytest -m slow --timeout 3600

test-gpu: $(STAMP)  ## what takes a GPU with CUDA, and a build of torch for it; without one it says so
	$(BIN)/python -m pytest -n 0 -rs tests/gpu

cloud-test: $(STAMP)  ## against real clouds, with your credentials: tests/remote/launchers/cloud/account.py
	$(BIN)/python -m pytest -n 0 -m cloud --timeout 1200 tests/remote/launchers/cloud

wheel: $(STAMP)  ## the wheel of this version, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

release-check: $(STAMP)  ## build sdist and wheel, check them, install and test the wheel outside the clone
	$(BIN)/python tools/release_check.py

test-versions:  ## the suite on each Python here, and contract tests with the oldest and the newest packages
	$(PYTHON) tools/test_versions.py

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
