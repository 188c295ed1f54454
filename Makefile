# `make train` and `make test` work on a fresh machine; both set up .venv first, once.
# PYTHON names the base interpreter (3.11 or newer), ARGS is passed on to the job, to pytest or to the torture suite.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
# Where the environment forbids Python to keep what it has compiled, each of the many processes here compiles all anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup train test test-minimal test-newest test-slow test-exhaustive test-trl test-clients torture families lint types pictures clean

setup: $(STAMP)

# The stamp is written last: an interrupted installation is done again, a finished one is not. Packages are compiled as
# they are first imported, which takes a fifth of the time that compiling all of their modules would.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lockstep needs Python 3.11 or newer, %s is %d.%d: make PYTHON=..." \
	  % (sys.executable, *sys.version_info[:2]) if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[train,deepspeed,events,grammar,lora,serve,triton,test]'
	@touch $@

# Two ranks on a CPU or on several GPUs, one where there is one GPU: each rank needs its own.
NPROC = $(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)),1,2)
train: setup
	$(BIN)/torchrun --nproc-per-node $(NPROC) -m lockstep.integration.grpo configs/arithmetic_cpu.toml $(ARGS)

# A process that crashes ends the run and its test is named: with a new process in its place xdist may wait for ever.
SHARED := --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Three processes share the test modules, since many tests wait more than they compute; with one thread each, for threads
# that wait for each other are slow on cores that others use too. Tests of threads set their number themselves. The
# longest modules begin (tests/conftest.py), so that the processes end together.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not exhaustive" -n 3 $(SHARED) $(ARGS)

# The quick tests where there is nothing but what a machine with a GPU may have: these versions, pytest, and no extra.
# PYTHON_MINIMAL names its interpreter, since NumPy 2.5 needs Python 3.12. This torch brings the CUDA libraries: 5 GB.
MINIMAL := .venv-minimal
PYTHON_MINIMAL ?= python3.12
test-minimal: $(MINIMAL)/.installed
	OMP_NUM_THREADS=1 $(MINIMAL)/bin/python -m pytest -q -m "not slow and not exhaustive" -n 2 $(SHARED) $(ARGS)

$(MINIMAL)/.installed: setup.cfg pyproject.toml
	$(PYTHON_MINIMAL) -m venv $(MINIMAL)
	$(MINIMAL)/bin/python -m pip install --quiet 'torch==2.11.*' 'triton==3.6.*' 'transformers==5.17.*' 'numpy==2.5.*' \
	  pytest pytest-timeout pytest-xdist
	$(MINIMAL)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

# The quick tests with the newest release of every package, which users get who install without constraints.txt. ARGS
# may name some. The environment is made anew each time; its torch brings the CUDA libraries.
NEWEST := .venv-newest
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet -e '.[train,deepspeed,events,grammar,lora,serve,triton,test]'
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -q -m "not slow and not exhaustive" -n 2 $(SHARED) $(ARGS)

# Three processes here too: these mostly wait for others that they started.
# pytest exits with 5 where it finds nothing to run, which is no failure here.
test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow and not exhaustive" -n 3 $(SHARED) $(ARGS) || [ $$? -eq 5 ]

# Every case of what test-slow has only one of each kind of. Not for every change: it takes half an hour and more.
test-exhaustive: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m exhaustive -n 2 --dist loadfile $(ARGS)

# TRL trains a toy model, with Lockstep's rollouts. Its packages are large, so that no other target installs them.
test-trl: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[trl]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/integration/trl tests/examples -k trl $(ARGS)

# Clients of other packages (renderers, verifiers, SkyRL, verl, AReaL, Atropos, vLLM's), each in an environment of its own, which pip installs:
# when the wire changes, or they do. ARGS names some of them.
test-clients: setup
	$(BIN)/python -m lockstep.tests.clients.run $(ARGS)

# Attack a server of our own, or --url's, and check that it holds: tests/torture/run.py says how.
torture: setup
	$(BIN)/python -m lockstep.tests.torture.run $(ARGS)

# Host a tiny model of every type that transformers knows, and write docs/reference/families.md: when transformers
# moves, or a family is added. A quarter of an hour; ARGS="--types qwen3 gpt2" measures some, ARGS=--check compares.
families: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m lockstep.tests.families.sweep $(ARGS)

lint: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The pictures of the documentation, from the code and the figures that they show.
pictures: setup
	$(BIN)/python docs/pictures/draw.py

# The root is the package: mypy finds it by a link (setup.cfg).
types: setup
	@mkdir -p .venv/types && ln -sfn ../.. .venv/types/lockstep
	$(BIN)/mypy -p lockstep

clean:
	rm -rf .venv $(MINIMAL) $(NEWEST) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
