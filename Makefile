# make run: train the quickstart.  make test: the whole suite.  make check: style, types, floors.
# make gpu: examine this machine's GPUs (GPU=FOLDER for the report).
# make bench: every time limit that the project promises.
# Another build of torch:  make install TORCH="torch==2.13.0 --index-url <your index>"
# make install LOCKED=1: every file but torch's is one whose hash requirements.lock has (PyPI's).
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
# Where the environment forbids bytecode, each of the suite's processes would compile all sources anew.
export PYTHONDONTWRITEBYTECODE :=

# make coverage: the suite with line coverage.
.PHONY: install run gpu test net long chaos fuzz mutants coverage check site audit lock stacks bench format clean
install: $(VENV)/.installed

PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

ifdef LOCKED
$(VENV)/.installed: pyproject.toml requirements.lock Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what requirements.lock names into $(VENV) ..."
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) -c constraints.txt $(TORCH)
	@$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

# The lock names the development tools too.
$(VENV)/.dev: $(VENV)/.installed
	@touch $@
else
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -c constraints.txt "pip>=25.1"  # --group needs it
	@echo "installing phalanx into $(VENV) ..."
	@$(PIP) -c constraints.txt $(TORCH)
	@$(PIP) -c constraints.txt -e ".[train]"
	@touch $@

# What only developers need stays out of a newcomer's first `make run`.
$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the development tools ..."
	@$(PIP) -c constraints.txt --group dev
	@touch $@
endif

run: install
	@$(BIN)/phalanx train examples/quickstart.toml

# Examine this machine's GPUs; without one, the step on a fake GPU. Parts whose results are in $(GPU) are not repeated.
GPU ?= gpu
gpu: install
	@$(BIN)/python -m benchmarks.gpu $(GPU)

# Most tests wait more than they compute: two at a time use two cores. Each worker has its own pool of ranks.
# From Python 3.12 on, whose sys.monitoring counts lines cheaply, the line coverage is reported too.
test: $(VENV)/.dev
	@COVERAGE_CORE=sysmon $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $$($(BIN)/python -c \
	  'import sys; sys.version_info >= (3, 12) and print("--cov --cov-report=term:skip-covered")')

# The suite, and every drawn examination at its full number of cases.
long: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long or not long" --timeout 3600

# Every command's numbers as recorded (tests/net/__init__.py), in a minute:  make net ONLY=predict
ONLY ?=
net: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/net -k "$(ONLY)"

# In tests/ its own folder hides benchmarks/ unless the root is on the path, as in the next three.
# Drawn inputs with mistakes, each held to the rule in tests/support/fuzz/rule.py:  make fuzz CASES=500 SEED=7
CASES ?= 2000
SEED  ?= 1
fuzz: $(VENV)/.dev
	@cd tests && PYTHONPATH=$(CURDIR) $(abspath $(BIN))/python -m support.fuzz --cases $(CASES) --seed $(SEED)

# Single lines that are broken on purpose, drawn by room, and whether a test that reaches them notices. All
# tests are run once before:  make mutants N=24 SEED=1 ROOMS="frameworks training" [TESTS="tests/frameworks"]
N     ?= 300
ROOMS ?=
mutants: $(VENV)/.dev
	@cd tests && PYTHONPATH=$(CURDIR) $(abspath $(BIN))/python -m mutants --count $(N) --seed $(SEED) $(ROOMS:%=--room %) $(TESTS)

# The suite, traced: half as much CPU time again on Python 3.11. Ranks and forked runs are not counted.
coverage: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=
	@$(BIN)/coverage report --skip-covered --sort=cover

# Runs that are killed, stopped, starved and lied to: `make chaos MINUTES=5` for a few.
MINUTES ?= 60
chaos: $(VENV)/.dev
	@cd tests && PYTHONPATH=$(CURDIR) $(abspath $(BIN))/python -m chaos --minutes $(MINUTES) --seed $(SEED)

check: $(VENV)/.dev
	@$(BIN)/python .ci/audit.py
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory site

# docs/ as a site in site/, from nothing but what is here; every link and anchor is checked. Read it, search included:
#   python3 -m http.server -d site
site: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pinned packages against the database of advisories: needs a network, and pip-audit.
audit: $(VENV)/.dev
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python .ci/audit.py --online

# requirements.lock and the bill of materials, from pyproject.toml and constraints.txt: needs uv.
lock: $(VENV)/.dev
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python .ci/lock.py

# Drawn exports before the parsers of the frameworks, each installed under .stacks/ (gigabytes; Python 3.12 for some).
# Not on PyPI: make stacks SOURCES=folder/with/the/repositories/of nanotron, maxtext, Megatron-Bridge, Megatron-LM
# and Megatron-LM-0.14 (a checkout of core_v0.14.0)
COUNT   ?= 200
SOURCES ?= .stacks
stacks: $(VENV)/.dev
	@cd tests && PYTHONPATH=. ../$(BIN)/python -m support.exports --count $(COUNT) --sources $(abspath $(SOURCES))

bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs
