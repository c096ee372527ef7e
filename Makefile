# SPDX-License-Identifier: Apache-2.0

SHELL := bash
PYTHON_HERE := .venv/bin/python
# Caches that would otherwise go to the user's home; and bytecode, which the set-up leaves to the first import.
HERE := env -u PYTHONDONTWRITEBYTECODE XDG_CACHE_HOME="$(CURDIR)/.cache" XDG_CONFIG_HOME="$(CURDIR)/.cache/config" \
	TRITON_HOME="$(CURDIR)/.cache" VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test conformance lint types format clean distclean

help:  ## say what the targets do
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12

setup:  ## make .venv (PYTHON=... picks the Python, LANE=cuda the GPU build)
	@bash scripts/setup.sh

demo: setup  ## steer the demo model, offline, on the CPU
	@$(HERE) $(PYTHON_HERE) demo/run.py

test: setup  ## run the tests (ARGS="tests/spec -x" for some of them)
	@$(HERE) $(PYTHON_HERE) -m pytest -q -m "not gpu" -n 2 --dist loadfile $(ARGS)

conformance: setup  ## prove every architecture, write the figures and the page (about half an hour)
	@$(HERE) CONFORMANCE=all $(PYTHON_HERE) -m pytest -q -m "not gpu" tests/conformance
	@$(HERE) VLLM_LOGGING_LEVEL=ERROR $(PYTHON_HERE) scripts/conformance.py
	@$(HERE) $(PYTHON_HERE) scripts/reference.py

lint: setup  ## ruff: rules and format
	@$(PYTHON_HERE) -m ruff check .
	@$(PYTHON_HERE) -m ruff format --check .

types: setup  ## mypy --strict
	@$(PYTHON_HERE) -m mypy

format: setup  ## let ruff repair and format the code
	@$(PYTHON_HERE) -m ruff check --fix .
	@$(PYTHON_HERE) -m ruff format .

clean:  ## remove caches and outputs
	@rm -rf .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo/out
	@find . -name .venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove .venv as well
	@rm -rf .venv
