# make run       train the example on two local processes
# make test      every test that this machine can run, and which took longest
# make soak      the long tests: 200 random lists of events, 200 kills, 20 launches in a row, every
#                failing rank on every transport, 100 random interruptions, 12 seeds of every pair of
#                options, 8 kills of every program
# make lint      ruff and mypy
# make docs      the documentation, in docs/_build/html
# make bench     the benchmarks against torch's DistributedDataParallel

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check

.PHONY: run test lint docs bench bench-quick slurm-test soak clean

run: $(VENV)/examples.stamp
	$(BIN)/python examples/mnist_ddp.py --nproc-per-node 2

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest --durations=15

slurm-test: $(VENV)/test.stamp
	$(BIN)/python -m pytest tests/slurm

soak: $(VENV)/test.stamp
	TORCHBEARER_DDP_SOAK=200 TORCHBEARER_DDP_LAUNCHES=20 TORCHBEARER_DDP_KILLS=200 TORCHBEARER_DDP_RESUMES=100 \
		$(BIN)/python -m pytest --timeout 3600 tests/faults/test_soak.py tests/faults/test_checkpoint_faults.py \
		tests/faults/test_ranks.py tests/checkpoints/test_resume_fuzz.py
	TORCHBEARER_DDP_PAIR_SEEDS=12 TORCHBEARER_DDP_PROJECT_KILLS=8 \
		$(BIN)/python -m pytest --timeout 3600 tests/pairs tests/projects

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/test.stamp $(VENV)/docs.stamp
	$(BIN)/python -m benchmarks

bench-quick: $(VENV)/test.stamp $(VENV)/docs.stamp
	$(BIN)/python -m benchmarks --quick

clean:
	rm -rf $(VENV) docs/_build build *.egg-info

# One environment; the constraints pin every version, torch first: it decides the others.
$(VENV)/base.stamp: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt torch
	touch $@

$(VENV)/%.stamp: $(VENV)/base.stamp
	$(PIP) install --no-build-isolation -c constraints.txt -e '.[$*]'
	touch $@
