# make demo   set up, run the paper's digit experiment, end with a report to open
# make test   set up, run the fast tests
# make peers  set up the peers in an environment of their own, run everything side by side
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PEERS := .venv-peers
BROWSER := tests/browser/node_modules/.installed

.PHONY: setup demo test test-slow check format bench-small experiments-small peers clean

setup: $(STAMP)

# torch is installed first and alone, so that the pinned version (and not a newer one) satisfies everything after it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt pip torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[cli,hf,images,serve]" --group dev
	touch $(STAMP)

demo: setup
	$(BIN)/eigentrace demo

# Small models do not gain from threads: one each, and as many tests at once as there are cores.
test: setup $(BROWSER)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow and not gpu"

# Chromium and a driver for it; where they cannot be had, it says so and the tests of the page are skipped.
$(BROWSER): tests/browser/package-lock.json tools/install_browser.sh
	tools/install_browser.sh

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "slow and not gpu"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Speed at sizes for anybody's machine, in two minutes; docs/results/README.md says how the large ones are measured.
bench-small: setup
	$(BIN)/python -m bench.projection --small
	$(BIN)/python -m bench.curvature --small

# Every experiment of the paper, and those on memorisation and a language model, at toy size, to see that all run;
# results go to runs/, docs/results/ has the real ones.
EXPERIMENTS := digits.mnist_small digits.mnist_large digits.mnist_long digits.mnist_neighbours digits.inverse_arnoldi \
	digits.error_analysis images.resnet_cifar images.vit_cifar images.image_exemplars images.resnet_curve images.scaling \
	images.memorization translation.mt_training translation.mt_retrieval translation.mt_layers \
	translation.mt_filter translation.mt_prefiltered translation.mt_exemplars translation.throughput \
	language.exchanged_answers
experiments-small: setup
	for name in $(EXPERIMENTS); do \
		$(BIN)/python -m experiments.$$name --small --replace --out runs/experiments-small || exit 1; \
	done

# Hours on a CPU; PEERS_OPTIONS="--problems digits --repeats 2" for some of it. docs/peers.md says what is compared.
peers: $(PEERS)/.installed
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m bench.peers $(PEERS_OPTIONS)

$(PEERS)/.installed: pyproject.toml constraints.txt bench/peers-requirements.txt bench/peers-needs.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt pip torch
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --editable . -r bench/peers-needs.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r bench/peers-requirements.txt
	touch $@

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv $(PEERS) tests/browser/node_modules .pytest_cache .ruff_cache .mypy_cache .hypothesis
