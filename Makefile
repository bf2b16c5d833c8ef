# Two commands for a newcomer, `make demo` and `make test`. Each first installs what it needs into .venv, once: the demo
# what training needs, the tests their tools over it.
# A Python of your choice: make PYTHON=python3.12 test (only read while .venv does not exist).
PYTHON ?= python3
WORKDIR ?= runs/demo
VENV := .venv
RUN := $(VENV)/bin/python
TRAIN := $(VENV)/installed-train
DEV := $(VENV)/installed-dev
KINDS := plain hc mhc
# Tests that reach jax, XLA and Flax in many ways, in about a minute: for a second Python.
SMOKE := tests/test_xla_options.py tests/residual/test_golden.py tests/residual/test_modules.py tests/model/test_layers.py \
    tests/train/test_step.py tests/train/test_checkpoint.py tests/data/test_pipeline.py tests/config/test_config.py

# Most of the suite's time is compilation: keep compiled programs between runs.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0

.PHONY: demo test test-scripts test-full smoke lint format install

demo: $(TRAIN)
	@for kind in $(KINDS); do \
	    echo "== $$kind: $(WORKDIR)/$$kind"; \
	    $(RUN) train.py --config configs/demo.py --config.residual.kind=$$kind --workdir $(WORKDIR)/$$kind || exit $$?; \
	done
	@$(RUN) -m eval.compare $(WORKDIR)
	@echo "Open $(WORKDIR)/report.html in a browser."

# Either writes the slowest tests to build/slowest.txt; tests/slowest.txt is that file as it was on a quiet machine. With a space
# for the =, pytest takes a file that is there for a test's, and no longer knows the option.
test: $(DEV)
	$(RUN) -m pytest -m "not slow" --numprocesses 2 --dist loadfile --slowest=build/slowest.txt

smoke: $(DEV)
	$(RUN) -m pytest -m "not slow" --numprocesses 2 --dist loadfile $(SMOKE)

# The scripts that create slices, with a stand-in for gcloud: they wait more than they compute. Part of test-full.
test-scripts: $(DEV)
	$(RUN) -m pytest -m scripts --numprocesses 2

test-full: $(DEV)
	$(RUN) -m pytest --numprocesses 2 --dist loadfile --slowest=build/slowest.txt

lint: $(DEV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/shellcheck .ci/run tpu/*.sh

format: $(DEV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

install: $(DEV)

# ensurepip is a package of its own on some systems; pip can then install a pip into the environment from outside.
$(RUN):
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), needed: 3.11 or newer; name one: make PYTHON=python3.12"; exit 2; }
	@echo "== Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(RUN) install --quiet pip; } || { rm -rf $(VENV); exit 2; }

$(TRAIN): pyproject.toml | $(RUN)
	@echo "== Installing what training needs into $(VENV) (once, one to three minutes)"
	@$(RUN) tools/install.py '.[train]'
	@touch $@

$(DEV): pyproject.toml | $(RUN)
	@echo "== Installing what the tests need into $(VENV) (once, one to three minutes)"
	@$(RUN) tools/install.py '.[dev]'
	@touch $(TRAIN) $@
