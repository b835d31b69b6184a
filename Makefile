# make run: train the quickstart.  make test: the whole suite.  make check: style, types, floors.
# make bench: every time limit that the project promises.
# Another build of torch:  make install TORCH="torch==2.13.0 --index-url <your index>"
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin

# make coverage: the suite with line coverage.
.PHONY: install run test long fuzz coverage check bench format clean
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
test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The suite, and every drawn examination at its full number of cases: an hour and more.
long: $(VENV)/.dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long or not long"

# Drawn inputs with mistakes, each held to the rule in tests/support/fuzz/rule.py:  make fuzz CASES=500 SEED=7
CASES ?= 2000
SEED  ?= 1
fuzz: $(VENV)/.dev
	@cd tests && ../$(BIN)/python -m support.fuzz --cases $(CASES) --seed $(SEED)

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
