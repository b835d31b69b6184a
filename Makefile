# make run: train the quickstart.  make test: the whole suite.  make check: style, types, floors.
# make bench: every time limit that the project promises.
# Another build of torch:  make install TORCH="torch==2.13.0 --index-url <your index>"
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin

# make coverage: the suite with line coverage.
.PHONY: install run test long coverage check bench format clean
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "pip>=25.1"  # --group needs it
	@echo "installing phalanx into $(VENV) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(TORCH)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[train]"
	@touch $@

# What only developers need stays out of a newcomer's first `make run`.
$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the development tools ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --group dev
	@touch $@

run: install
	@$(BIN)/phalanx train examples/quickstart.toml

# Most tests wait more than they compute: two at a time use two cores. Each worker has its own pool of ranks.
# From Python 3.12 on, whose sys.monitoring counts lines cheaply, the line coverage is reported too.
test: $(VENV)/.dev
	@COVERAGE_CORE=sysmon $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $$($(BIN)/python -c \
	  'import sys; sys.version_info >= (3, 12) and print("--cov --cov-report=term:skip-covered")')

# The suite, and every drawn examination at its full number of cases.
long: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long or not long"

# The suite, traced: half as much CPU time again on Python 3.11. Ranks and forked runs are not counted.
coverage: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=
	@$(BIN)/coverage report --skip-covered --sort=cover

check: $(VENV)/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.dev
	@$(BIN)/python -m benchmarks

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs
