# Every target makes .venv first, if pyproject.toml or constraints.txt changed since it was made.
#   make demo ARGS='--nodes 5 --kill 2 --redundancy stripe:3+1'
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
ARGS ?=

.PHONY: setup demo test check bench sim fuzz kills mutants clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,fast]'
	touch $@

demo: $(STAMP)
	$(BIN)/planaria demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict

bench: $(STAMP)
	$(BIN)/python -m benchmarks stall $(ARGS)

# make sim SEED=1 RUNS=2000 repeats so many runs; without RUNS, a minute of them from SEED or a fresh seed.
sim: $(STAMP)
	$(BIN)/python -m simulations $(if $(SEED),--seed $(SEED)) $(if $(RUNS),--runs $(RUNS),--seconds 60) $(ARGS)

# Two minutes for all readers together; ARGS='--seconds 1800 --target tree' for more of one.
fuzz: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz $(ARGS)

# Half an hour; ARGS='-k save.ack' for some of the cases.
kills: $(STAMP)
	$(BIN)/python -m pytest tests/kills/matrix.py $(ARGS)

# Hours on one core; ARGS="--cores 8" on more, ARGS="'recovery.plan.*'" for one module.
mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
