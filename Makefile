# Needs Python 3.11, 3.12 or 3.13 (PYTHON=python3.12 names one), g++ and make. `make install` once, then `make serve`.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
MODEL ?= build/default-model
HOST ?= 127.0.0.1
PORT ?= 8000
SOURCE ?=
IMAGE ?= rbln-serve
ARGS ?=
TESTS ?= tests

python := $(VENV)/bin/python
stamps := $(VENV)/.stamps
scripts := deploy/scripts
kernels := $(shell find rbln_backend/devices/emulated/kernels -name '*.cpp' -o -name '*.h') rbln_backend/devices/emulated/build.py
# The default model's served name, without the path of its folder.
name := $(if $(filter build/default-model,$(MODEL)),--served-model-name default-model)
# Models to download first: rbln_backend/checkpoints/folders.py.
fetched := smollm2
# Tests and tools never report usage or query a model hub.
quiet := VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1
# Two workers with two threads each on two cores wait for each other half of the time. Byte code is
# kept, as compiling the tests takes as long as importing what they test.
testing := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: help install dev serve test test-tools test-fast test-nixl lint bench chart docs docs-site published flags upstream lock wheel image clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(stamps)/torch ## Locked environment, this project, its kernels, a default model
	@$(MAKE) --no-print-directory --jobs 2 $(stamps)/kernels $(stamps)/project build/default-model/config.json

dev: $(stamps)/project build/default-model/config.json $(stamps)/dev

serve: install ## Serve MODEL (a folder, smollm2) on HOST:PORT; ARGS go to the server unchanged
	$(if $(filter $(fetched),$(MODEL)),$(VENV)/bin/rbln-serve fetch $(MODEL))
	exec $(VENV)/bin/rbln-serve serve $(MODEL) $(name) --host $(HOST) --port $(PORT) $(ARGS)

test: dev $(stamps)/test-kernels ## Run TESTS with pytest, except those marked wide; ARGS go to pytest
	$(quiet) $(testing) $(python) -m pytest -m 'not wide' --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(TESTS) $(ARGS)

test-fast: dev $(stamps)/test-kernels ## Tests of all parts that start no engine and are not slow
	$(quiet) $(testing) $(python) -m pytest -m 'not wide and not engine and not slow' --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(TESTS) $(ARGS)

test-tools: ## As root: install the Debian packages without which `make test` skips tests
	$(scripts)/install_test_tools.sh

test-nixl: dev build/nixl/.stamp ## Tests of KV transfer with the real nixl, installed into build/nixl
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/nixl $(quiet) $(python) -m pytest --numprocesses 0 tests/engine/test_kv_transfer.py tests/server/test_prefill_decode.py $(ARGS)

lint: dev docs-site ## ruff, mypy --strict, import contracts, hadolint, shellcheck and the site's links
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/shellcheck .ci/run deploy/*/*.sh tests/image/*.sh

bench: dev ## Ours against vLLM's CPU backend, llama.cpp and transformers; ARGS go to benchmarks compare
	$(quiet) $(python) -m benchmarks compare --save $(ARGS)

chart: dev ## Rewrite values.schema.json of the Helm chart
	$(python) -m deploy.kubernetes.generate

docs: dev ## Rewrite the generated tables of README and docs/
	$(quiet) $(python) docs/generate.py

docs-site: build/site-tools/.stamp ## Build the documentation site into build/site; SOURCE makes links to the code
	SOURCE="$(SOURCE)" NO_MKDOCS_2_WARNING=1 build/site-tools/bin/mkdocs build

published: dev ## Run `check` on published models (ARGS, else all) for docs/models.md
	$(quiet) $(python) docs/published.py $(ARGS)

flags: dev ## Rewrite the list of vLLM's flags, by which misspelt ones are refused
	$(quiet) VLLM_LOGGING_LEVEL=ERROR $(python) -m deploy.upstream.flag_names

upstream: dev ## Report what the release VLLM would break, e.g. VLLM=0.32.0; nothing is upgraded
	$(quiet) deploy/upstream/compare.sh $(VENV) $(VLLM)

lock: dev ## Resolve requirements/*.in again; ARGS=--upgrade moves versions
	$(python) requirements/lock.py $(ARGS)

wheel: $(stamps)/locked ## Build a wheel with the kernels of all CPU levels into dist/
	$(python) $(scripts)/build_wheel.py dist

image: ## Build the image IMAGE (rbln-serve); SOURCE is the repository's public address, ARGS go to docker build
	docker build --tag $(IMAGE) \
		--build-arg REVISION="$$(git rev-parse HEAD)$$(git diff --quiet HEAD || echo -modified)" \
		--build-arg CREATED="$$(date -u +%Y-%m-%dT%H:%M:%SZ)" --build-arg SOURCE="$(SOURCE)" $(ARGS) .

build/nixl/.stamp: requirements/nixl.txt
	$(python) -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps --upgrade --target build/nixl -r requirements/nixl.txt
	@touch $@

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build deploy/vllm-metadata/build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf *.egg-info deploy/vllm-metadata/*.egg-info

$(stamps)/torch: requirements/torch.txt $(scripts)/install.sh
	@PYTHON=$(PYTHON) $(scripts)/install.sh $(VENV) requirements/torch.txt
	@mkdir -p $(@D) && touch $@

$(stamps)/locked: requirements/cpu.lock $(stamps)/torch
	$(scripts)/install.sh $(VENV) requirements/cpu.lock
	@touch $@

# In parallel with the remaining packages: they wait for the disk, compilers for a core.
# If the build fails, the first start reports the reason and the fallback.
$(stamps)/kernels: $(kernels) $(stamps)/torch
	$(python) -m rbln_backend.devices.emulated.build --variants native \
		--into "$${VLLM_CACHE_ROOT:-$${XDG_CACHE_HOME:-$$HOME/.cache}/vllm}" || echo "the kernels were not built ahead" >&2
	@touch $@

# With the locked setuptools: nothing is fetched.
$(stamps)/project: $(stamps)/locked pyproject.toml deploy/vllm-metadata/pyproject.toml
	$(python) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --no-index ./deploy/vllm-metadata -e .
	@touch $@

$(stamps)/dev: $(stamps)/locked requirements/dev.lock
	$(scripts)/install.sh $(VENV) requirements/dev.lock
	@touch $@

# Into a cache of tests: they do not read the one of a service.
$(stamps)/test-kernels: $(kernels) $(stamps)/torch
	$(python) -m tests.kernel_cache
	@touch $@

build/site-tools/.stamp: requirements/site.lock $(scripts)/install.sh
	rm -rf $(@D)
	@PYTHON=$(PYTHON) $(scripts)/install.sh $(@D) requirements/site.lock
	@touch $@

# Replaced atomically, because a running server may read the former one.
build/default-model/config.json: $(wildcard default_model/checkpoint/* default_model/checkpoint/adapter/*)
	rm -rf $(@D).part && mkdir -p $(dir $(@D)) && cp -R default_model/checkpoint $(@D).part
	rm -rf $(@D) && mv $(@D).part $(@D)
