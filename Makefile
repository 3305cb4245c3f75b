# One virtual environment, rebuilt when the pins or the package's description change. No root, no system packages.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp-$(shell cat constraints.txt pyproject.toml | cksum | tr ' ' '-')

.DEFAULT_GOAL := help
.PHONY: help demo bundle zoo test test-system test-long clean check check-format check-types check-imports check-wheel

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(STAMP) ## a campaign, a predictor and a prediction of an unseen cell on this machine; results in .demo/
	$(PY) -m precision_time.flows.demo

# Into an empty registry, so that nothing is compared with a champion; the same table, code and seed give the same bytes.
bundle: $(STAMP) ## train on the public measurements and put the artifact that ships into predictor/data/bundled
	registry=$$(mktemp -d) && trap 'rm -rf "$$registry"' EXIT && \
	$(PY) -m precision_time retrain --public --seed 0 --registry "$$registry" --export predictor/data/bundled

# timm and torchvision need their own torch, so the zoo has an environment of its own; walks are kept until all are done.
zoo: .venv-zoo/.stamp ## build and walk every network of the zoo anew into predictor/data/zoo.parquet: hours of one core
	OMP_NUM_THREADS=1 .venv-zoo/bin/python -m precision_time.tasks.zoo.build

.venv-zoo/.stamp: constraints.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv-zoo
	.venv-zoo/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[zoo]'
	@touch $@

test: $(STAMP) ## the quick tests: any CPU machine, under 10 minutes
	$(PY) -m pytest -m "not ui and not mpi and not faults and not compiler and not slow and not gpu and not long"

test-system: $(STAMP) ## browser, MPI, fault, Slurm, PostgreSQL and slow tests (.ci/run lists Debian's parts)
	$(PY) -m pytest -m "(ui or mpi or faults or compiler or slow) and not gpu and not long"

test-long: $(STAMP) ## the tests that take minutes each
	$(PY) -m pytest -m "long and not gpu"

check: check-format check-types check-imports check-wheel ## format, lint, types, import rules, wheel; all of it with -k

check-format: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

check-types: $(STAMP) .link/precision_time
	$(PY) -m mypy -p precision_time

check-imports: $(STAMP) .link/precision_time
	PYTHONPATH=.link $(VENV)/bin/lint-imports --no-logo

check-wheel: $(STAMP)
	$(PY) .ci/check_wheel.py

# Static checkers find the package of this folder by following a link in it.
.link/precision_time:
	@mkdir -p .link && ln -sfn .. $@

clean: ## remove what the targets made, .venv excepted
	rm -rf build dist *.egg-info .link .demo .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The name holds the digest of the pins, so it alone says whether .venv is up to date.
$(STAMP):
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); sys.exit(None if ok else "Python 3.11 to 3.13 is needed, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "the venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@rm -f $(VENV)/.stamp-*
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): some minutes, about 2.5 GB"
	@$(PY) -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
