# make demo   set up, run the paper's digit experiment, end with a report to open
# make test   set up, run the fast tests
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test test-slow check format bench-small clean

setup: $(STAMP)

# torch is installed first and alone, so that the pinned version (and not a newer one) satisfies everything after it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt pip torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[cli,hf]" --group dev
	touch $(STAMP)

demo: setup
	$(BIN)/eigentrace demo

# Small models do not gain from threads: one each, and as many tests at once as there are cores.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow and not gpu"

test-slow: setup
	$(BIN)/python -m pytest -m "slow"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Speed at sizes for anybody's machine, in two minutes; docs/results/README.md says how the large ones are measured.
bench-small: setup
	$(BIN)/python -m bench.projection --small
	$(BIN)/python -m bench.curvature --small

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis
