# make train   set up, then train the main job and evaluate it    (a run that exists is continued)
# make test    set up, then run the tests
# make quick   the tests of configuration, numerics, layers and certificates, half a minute
# make check   formatting, lint, types, imports
# make docs    the site in site/, with every link checked
# make clean   remove the environment and all caches; never a run
#
# The environment is .venv. A version of Python other than python3: make train PYTHON=python3.12

PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: train test quick check docs clean

train: .venv/runtime.stamp
	$(BIN)/python train.py run.name=first
	$(BIN)/python evaluate.py checkpoint=checkpoints/first

# One thread a process: the processes are the parallelism.
test: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

quick: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal \
	  tests/config tests/numerics tests/nn/test_layers.py tests/nn/test_certificate.py

check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

docs: .venv/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# torch goes first: asked for by name it is taken in the constrained version, in whatever build is at
# hand; met as somebody's dependency, its newest release is looked at too, with gigabytes of CUDA.
.venv/runtime.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: $(PYTHON) is older than Python 3.11: make PYTHON=python3.11 $(MAKECMDGOALS)" or 0)'
	@echo "Setting up .venv; the first time this takes a few minutes."
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
	$(PIP) -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
