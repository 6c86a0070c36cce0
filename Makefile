# Everything runs inside .venv, which is made once and again only when these files change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo gpu test test-all coverage test-page lint types format clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## make .venv with everything that development needs

$(READY): pyproject.toml constraints.txt src/sparsam/__init__.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Two processes train, with one thread each. The last command finds all runs finished, and compares. It trains what the
# first process has left if that failed.
DEMO := --seeds 3 --sharpness 0.1 --samples 500 --output runs/demo
demo: $(READY)  ## train a small network on embedded data with SGD, SAM and sparse SAM, and compare
	rm -rf runs/demo && mkdir -p runs
	@echo "Two processes train five methods with three seeds each; the progress is that of one. Then steps are timed."
	$(BIN)/sparsam compare digits-sam digits-ssam-f $(DEMO) --rounds 0 >/dev/null 2>runs/demo.log & other=$$!; \
		$(BIN)/sparsam compare digits-sgd digits-ssam-d digits-thrifty $(DEMO) --rounds 0 >/dev/null; \
		wait $$other || { tail -n 3 runs/demo.log; echo "The process for SAM and SSAM-F failed. Once more:"; }
	$(BIN)/sparsam compare digits-sgd digits-sam digits-ssam-f digits-ssam-d digits-thrifty $(DEMO)

OPTIONS ?=
gpu: $(READY)  ## train what the documentation lacks, on a GPU: make gpu OPTIONS='--data FOLDER --minutes 60'
	$(BIN)/python benchmarks/gpu.py $(OPTIONS)

test: $(READY)  ## all tests that need neither a GPU nor many minutes
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'not slow'

test-all: $(READY)  ## every test, exhaustive sweeps included
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

coverage: $(READY)  ## which lines of src the tests run
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'not slow' --cov=sparsam --cov-report=term:skip-covered

test-page: $(READY)  ## the report page in a real browser (needs chromium and chromedriver; `make test` skips it without)
	$(BIN)/python -m pytest tests/report tests/cli tests/analysis -k 'page or browser'

lint: $(READY)  ## ruff: lint and format; the width of Markdown lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest --quiet tests/test_docs.py -k lines_are_short

types: $(READY)  ## mypy --strict on src
	$(BIN)/mypy --strict src

format: $(READY)  ## let ruff rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## forget the environment and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
