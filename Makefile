# Two commands do everything: `make search` and `make test`. Both make the virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MINIMUM := $(VENV)-minimum
FREE ?= torch
CASES ?= --first-cases

.PHONY: search test test-all test-minimum lint format notebooks dashboard audit fuzz security lock demo-model stock-model clean

search: $(VENV)/.installed
	$(BIN)/python -m search.run --trials 200

# Units and contracts, greedy identity, distributions, a resume, a kill, a search from one end to the other: minutes.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not slow and not browser"

# Everything: servers and databases that die, chaos, memory, notebooks, browser and rehearsals too. What CI runs.
test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Are the lower bounds in pyproject.toml true? Its own environment of the lowest versions admitted, and there every test that is
# not marked slow, browser or gpu, once: of a parametrised one the first case. `CASES=` runs all of their cases.
# Without kernels compiled for the CPU, as on a machine that has no compiler: `make test` has them.
# torch is left to pip: the older wheels that PyPI has bring gigabytes of CUDA libraries. `FREE=` holds it down too.
test-minimum: $(MINIMUM)/.installed
	LAYERSKIP_KERNELS=0 $(MINIMUM)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(CASES) -m "not slow and not browser and not gpu"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dashboard: $(VENV)/.installed
	$(BIN)/python -m search.dashboard

# Ten thousand random greedy runs against `generate`; goes on where it was stopped. Some ten minutes on one core.
audit: $(VENV)/.installed-test
	$(BIN)/python -m studies.audit.run

# More than ten thousand malformed inputs for every parser; the suite runs a few hundred.
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/fuzz --hypothesis-profile=fuzz --timeout=0

# Known vulnerabilities of the pinned packages, and secrets in tracked files.
security: $(VENV)/.installed-test
	$(BIN)/python .ci/security.py

# Trains the shipped model anew: more than an hour on two idle cores.
demo-model: $(VENV)/.installed
	$(BIN)/python -m studies.demo.make_model

# Trains its stock twin, which is not shipped, into studies/stock/model: an hour on one thread.
stock-model: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.demo.make_model --recipe stock --batch 8 --tokens 3000000 --threads 1 \
		--out studies/stock/model

# Writes constraints.txt from a fresh environment; "+cpu" and the like are dropped so that it fits every platform.
lock:
	rm -rf $(VENV).lock
	$(PYTHON) -m venv $(VENV).lock
	$(VENV).lock/bin/python -m pip install --quiet -e ".[test]"
	$(VENV).lock/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > constraints.txt
	rm -rf $(VENV).lock

clean:
	rm -rf $(VENV) $(MINIMUM) build *.egg-info .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@ $(VENV)/.installed

$(MINIMUM)/.installed: pyproject.toml .ci/minimum.py | $(VENV)/bin/python
	rm -rf $(MINIMUM)
	$(BIN)/python -m venv $(MINIMUM)
	$(BIN)/python .ci/minimum.py --extra test --free $(FREE) > $(MINIMUM)/constraints.txt
	$(MINIMUM)/bin/python -m pip install --quiet --disable-pip-version-check -c $(MINIMUM)/constraints.txt -e ".[test]"
	touch $@
