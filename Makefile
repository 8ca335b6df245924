# make run       train the example on two local processes, and compare their speed with that of one
# make test      every test that this machine can run, and which took longest
# make soak      the long tests: 200 random lists of events, 200 kills, 20 launches in a row, every
#                failing rank on every transport, 100 random interruptions, every odd value at every
#                place of a checkpoint, 12 seeds of every pair of options, 8 kills of every program,
#                10,000 changes of requires_grad, 1,000 simulated ranks
# make fuzz      every reader of outside data under atheris, FUZZ_SECONDS each (60)
# make gpu-test  equality, faults, resume, mixed precision and a benchmark on two GPUs through NCCL
# make compat    the tests with the oldest Python and torch that are supported, and with the newest
# make lint      ruff and mypy
# make docs      the documentation, in docs/_build/html
# make bench     the benchmarks against torch's DistributedDataParallel
# make bench-peers  the one against Lightning, accelerate and torchrun, in an environment of its own

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check

# make test PROCESSES=4 shares out the files of tests between four processes, 0 takes one after the other.
PROCESSES ?= 2
# For make compat, for example: make compat FLOOR_PYTHON=~/.pyenv/versions/3.10.13/bin/python
FLOOR_PYTHON ?= python3.10
FLOOR_TORCH ?= 2.10.0
NEWEST_PYTHON ?= python3.13
# Wheels of torch for the CPU alone; those of PyPI bring CUDA's libraries along.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
COMPAT_TESTS ?= tests
# For make fuzz, for example: make fuzz FUZZ_SECONDS=3600 FUZZ_TARGETS=message
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= message post checkpoint_file foreign_file checkpoint_contents environment flags

# Some containers set it; then each of the many processes of the tests compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test lint docs bench bench-quick bench-peers slurm-test fuzz gpu-test soak compat compat-floor compat-newest clean

run: $(VENV)/examples.stamp
	$(BIN)/python examples/mnist_ddp.py --nproc-per-node 2 --compare

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(PROCESSES) --no-loadscope-reorder --durations=15

slurm-test: $(VENV)/test.stamp
	$(BIN)/python -m pytest tests/slurm

fuzz: $(VENV)/test.stamp $(VENV)/fuzz.stamp
	for target in $(FUZZ_TARGETS); do \
		$(BIN)/python -m tests.fuzz $$target -max_total_time=$(FUZZ_SECONDS) || exit 1; done

gpu-test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -rs --timeout 600 tests/gpu

soak: $(VENV)/test.stamp
	TORCHBEARER_DDP_SOAK=200 TORCHBEARER_DDP_LAUNCHES=20 TORCHBEARER_DDP_KILLS=200 TORCHBEARER_DDP_RESUMES=100 \
		$(BIN)/python -m pytest --timeout 3600 tests/faults/test_soak.py tests/faults/test_checkpoint_faults.py \
		tests/faults/test_ranks.py tests/checkpoints/test_resume_fuzz.py
	TORCHBEARER_DDP_ODD_RESUMES=100000 $(BIN)/python -m pytest -s tests/fuzz/test_odd_resumes.py tests/fuzz/test_optimizer_states.py
	TORCHBEARER_DDP_PAIR_SEEDS=12 TORCHBEARER_DDP_PROJECT_KILLS=8 TORCHBEARER_DDP_TOGGLES=10000 \
		$(BIN)/python -m pytest --timeout 3600 tests/pairs tests/projects tests/callbacks/test_trained.py
	TORCHBEARER_DDP_SIMULATED_RANKS=1000 $(BIN)/python -m pytest --timeout 3600 tests/scale

compat: compat-floor compat-newest

compat-floor compat-newest: compat-%: $(VENV)-%/compat.stamp
	$(VENV)-$*/bin/python -m pytest $(COMPAT_TESTS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -a -q -b html docs docs/_build/html

bench: $(VENV)/test.stamp
	$(BIN)/python -m benchmarks

bench-quick: $(VENV)/test.stamp
	$(BIN)/python -m benchmarks --quick

bench-peers: $(VENV)/test.stamp $(VENV)-peers/peers.stamp
	$(BIN)/python -m benchmarks --only peers --keep

clean:
	rm -rf $(VENV) $(VENV)-floor $(VENV)-newest $(VENV)-peers docs/_build build *.egg-info

# One environment; the constraints pin every version, torch first: it decides the others.
$(VENV)/base.stamp: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt torch
	touch $@

$(VENV)/%.stamp: $(VENV)/base.stamp
	$(PIP) install --no-build-isolation -c constraints.txt -e '.[$*]'
	touch $@

# What the package is compared with, and the package; torch first, by the constraints, or its peers
# would bring another one.
$(VENV)-peers/peers.stamp: setup.py constraints.txt benchmarks/peers_requirements.txt
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/pip install -q -c constraints.txt setuptools wheel
	$(VENV)-peers/bin/pip install -q -c constraints.txt torch
	$(VENV)-peers/bin/pip install -q -c constraints.txt -r benchmarks/peers_requirements.txt
	$(VENV)-peers/bin/pip install -q --no-build-isolation -c constraints.txt -e .
	touch $@

# The floor: the lower bounds of Python and torch. The pinned versions are for newer Pythons.
$(VENV)-floor/compat.stamp: setup.py
	$(FLOOR_PYTHON) -m venv $(VENV)-floor
	$(VENV)-floor/bin/pip install -q -U setuptools wheel
	$(VENV)-floor/bin/pip install -q --extra-index-url $(TORCH_INDEX) torch==$(FLOOR_TORCH)
	$(VENV)-floor/bin/pip install -q --no-build-isolation -e '.[test]'
	touch $@

# The newest: what a plain pip install takes today.
$(VENV)-newest/compat.stamp: setup.py
	$(NEWEST_PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/pip install -q -U setuptools wheel
	$(VENV)-newest/bin/pip install -q -U --extra-index-url $(TORCH_INDEX) torch
	$(VENV)-newest/bin/pip install -q -U --no-build-isolation -e '.[test]'
	touch $@
