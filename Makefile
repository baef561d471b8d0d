# make run and make test need Python 3.10+ and network access; the first one creates .venv. Neither needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := dev,train,serve,tensorboard,wandb,mlflow,hf,timm,lightning,onnx,sklearn,retrieval,tune,clip

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The wheel of pyright carries the type checker: no download on first use.
export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT := true
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow lint types browser bench docs wheel clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## create the environment in .venv (the other targets do it when needed)

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else f"hetxl needs Python 3.10 or newer; {sys.executable} is {v.major}.{v.minor}. Try: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "Creating the environment in $(VENV) (a few minutes, once)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]' --editable lab
	@touch $@

run: $(STAMP) ## train every head on Python's own source code and compare them (about 5 minutes)
	@$(BIN)/hetxl compare

test: $(STAMP) lint types ## format, lint, types and tests: what a change must pass
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal # one thread each: two would wait for each other

lint: $(STAMP)
	@$(BIN)/ruff format --check --quiet . || { echo "Run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .

types: $(STAMP)
	@$(BIN)/pyright --warnings

browser: ## install Chromium from Debian's packages (needs root); without it the browser tests are skipped
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || \
	  { echo "Installing Chromium"; apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core > /dev/null; }

test-slow: $(STAMP) ## the slow tests, over an hour: damaged files, killed runs, a long run, all examples, the wheel
	@$(BIN)/python -m pytest -m slow

bench: $(STAMP) ## measure samplers, methods, the engine and the training loop against their limits (about an hour)
	@$(BIN)/python benchmarks/samplers.py --write docs/methods.md
	@$(BIN)/python benchmarks/methods.py --write docs/methods.md
	@$(BIN)/python benchmarks/engine.py --write docs/benchmarks.md
	@$(BIN)/python benchmarks/train.py --write docs/benchmarks.md
	@PYTHONPATH=tests/support/site $(BIN)/python benchmarks/loader.py --write docs/benchmarks.md
	@$(BIN)/python benchmarks/contrastive.py --write docs/benchmarks.md
	@$(BIN)/python benchmarks/millions.py --write docs/many_classes.md
	@$(BIN)/python benchmarks/retrieved.py --write docs/many_classes.md
	@# Last, and both in any case: bars of them are not met yet.
	@$(BIN)/python benchmarks/serve.py --write docs/benchmarks.md; served=$$?; \
	  $(BIN)/python benchmarks/top_classes.py --write docs/benchmarks.md && exit $$served

docs: $(STAMP) ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "Open site/index.html" # --quiet would let warnings pass

wheel: $(STAMP) ## build the wheel into dist/
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null && ls dist/*.whl

clean: ## remove everything that can be rebuilt
	rm -rf $(VENV) dist build site .pytest_cache .ruff_cache
