# make setup | demo | test | sanitize | lint | train | docs | clean
# PYTHON: interpreter to build .venv with (3.11 or later). TORCH: requirement installed first; a fixed version keeps pip
# from choosing a build with CUDA packages where a CPU build of it is on hand.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n 2

BIN := .venv/bin
STAMPS := .venv/.stamps
NATIVE := CMakeLists.txt $(shell find src/dlmrt/cpu -name CMakeLists.txt -o -name '*.[ch]pp')
RECIPES := tiny_ar tiny_mask_a tiny_mask_b tiny_mask_c tiny_mask tiny_worded tiny_uniform_a tiny_uniform

WORD_PROBLEM := A pie has 54 portions. If Elijah can eat 6 portions a day while James can eat 2 times as much, how many days \
	will the pie last?
CHAIN := State the final answer to the following arithmetic problem: 41 - 16 + 27 =

# Public libraries that open our files in the tests, without what only their trainers need; Triton, which interprets and
# compiles kernels of GPUs without one; the bindings of the CUDA driver, whose functions are compared with the stand-in.
PEERS := nvidia-modelopt==0.47.0 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 pulp==3.3.2 scipy==1.17.1 \
	nvidia-ml-py==13.615.71 triton==3.6.0 cuda-bindings==13.0.3 cuda-pathfinder==1.9.1

.PHONY: setup peers demo test sanitize lint types unit train docs clean

setup: $(STAMPS)/dev

$(STAMPS)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; run make PYTHON=python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/run: pyproject.toml $(NATIVE) $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(STAMPS)/dev: pyproject.toml $(NATIVE) $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(STAMPS)/run

peers: setup
	$(BIN)/python -m pip install --quiet --no-deps $(PEERS)

demo: $(STAMPS)/run
	@echo '> $(WORD_PROBLEM)'
	@$(BIN)/dlmrt generate --timings '$(WORD_PROBLEM)'
	@echo
	@echo '> $(CHAIN)'
	@$(BIN)/dlmrt generate --timings '$(CHAIN)'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports --no-cache

types: setup
	$(BIN)/mypy

# All pairs of family and rule in the cuda executor's loop, all its kernels for three architectures (an hour):
# DLMRT_TEST_CUDA_MATRIX=all
unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PYTEST_ARGS)

test: lint types
	@$(MAKE) --no-print-directory unit

# The C++ checks of the kernels (every instruction set, several threads) with address and undefined-behaviour sanitizers;
# needs cmake, ninja and a C++ compiler only. All kernel tests and the thread sanitizer: DLMRT_TEST_SANITIZERS=1 make unit
SANITIZED := build/cpu-kernels-address-undefined
sanitize:
	cmake -G Ninja -S tests/dlmrt/cpu/kernels -B $(SANITIZED) -DDLMRT_SANITIZE=address,undefined
	cmake --build $(SANITIZED) --target test_kernels
	$(SANITIZED)/test_kernels

train: setup
	for recipe in $(RECIPES); do $(BIN)/orl pretrain recipes/$$recipe.toml || exit; done
	$(BIN)/orl train recipes/tiny_mask_orl.toml

docs: setup
	$(BIN)/python scripts/write_docs.py

clean:
	rm -rf .venv build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests scripts -name __pycache__ -type d -exec rm -rf {} +
