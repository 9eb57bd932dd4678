# make setup | demo | test | lint | train | docs | clean
# PYTHON: interpreter to build .venv with (3.11 or later). TORCH: requirement installed first; a fixed version keeps pip
# from choosing a build with CUDA packages where a CPU build of it is on hand.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n 2

BIN := .venv/bin
STAMPS := .venv/.stamps
RECIPES := tiny_ar tiny_mask tiny_uniform

WORD_PROBLEM := There are 22 students playing basketball and twice that number playing badminton. There are 15 boys \
	and 12 girls playing table tennis. If each student only participates in one group, how many students are there in total?
CHAIN := State the final answer to the following arithmetic problem: 12 + 35 - 7 + 21 =

.PHONY: setup demo test lint types unit train docs clean

setup: $(STAMPS)/dev

$(STAMPS)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; run make PYTHON=python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/run: pyproject.toml $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/torch
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(STAMPS)/run

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

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PYTEST_ARGS)

test: lint types
	@$(MAKE) --no-print-directory unit

train: setup
	for recipe in $(RECIPES); do $(BIN)/orl pretrain recipes/$$recipe.toml || exit; done

docs: setup
	$(BIN)/python scripts/write_docs.py

clean:
	rm -rf .venv build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests scripts -name __pycache__ -type d -exec rm -rf {} +
