# Needs only Python 3.11 or newer (with venv and pip) and make. Every target first makes `.venv`, once.
# Another Python beside it: make test PYTHON=python3.13 VENV=.venv-3.13
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs
GPU_COMPILER := $(VENV)/gpu-compiler
BROWSER := $(VENV)/browser
MAXTEXT_PACKAGES := $(VENV)/maxtext
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Tests and commands start many processes of Python, which would each compile all modules again: half of their start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo release-check test test-all version-test verify-test maxtext-test page-test all-options pictures lint bench bench-small bench-alpa docs clean versions

help:
	@echo "make demo         plan and train a small GPT on 8 virtual devices (DATA=path for your own text)"
	@echo "make test         the tests, without those marked slow"
	@echo "make test-all     every test, full tables of combinations included"
	@echo "make version-test the tests that a version of Python or JAX can change"
	@echo "make verify-test  real compilations for GPUs that are not here (downloads 0.3 GB once; ONLY=part of names)"
	@echo "make maxtext-test MaxText's own step under exported settings (MAXTEXT=folder of its sources; downloads 0.2 GB once)"
	@echo "make page-test    pages of plans in a real browser (downloads 0.3 GB once)"
	@echo "make all-options  the page of all commands and options"
	@echo "make pictures     the pictures of the documentation"
	@echo "make lint         formatting, lint and types"
	@echo "make bench        every benchmark that needs nothing else, each writing a dated result"
	@echo "make bench-small  small cases beside the plain step, compared with the recorded result"
	@echo "make bench-alpa   every case of Alpa's suites planned and predicted, in bench-alpa/ (goes on where it stopped)"
	@echo "make release-check  what a release must pass: builds, clean installations, demo, links, spelling, documentation"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make versions     the versions of Python, JAX and the libraries that are tested with it"
	@echo "make clean        remove .venv, caches and build products"

# The stamp is written last, so that an interrupted installation is taken up again.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "aliquot needs Python 3.11 or newer, found %d.%d; name another with: make PYTHON=python3.12" % v[:2])'
	@echo "Installing into $(VENV), once; this takes one to five minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --disable-pip-version-check --no-color --editable '.[zoo,plot,test,dev]'
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

versions: $(INSTALLED)
	@$(BIN)/python -c 'import sys; from importlib.metadata import version; print("Python %d.%d.%d" % sys.version_info[:3], *("%s %s" % (n, version(n)) for n in ("jax", "jaxlib", "flax", "optax", "equinox", "numpy")), sep=", ")'

demo: $(INSTALLED)
	$(BIN)/aliquot demo $(if $(DATA),--data '$(DATA)')

test: $(INSTALLED)
	$(PYTEST) -m "not slow"

# Planners, costs, texts, messages between processes and what rebuilds graphs are the same for every version: they read graphs,
# which are tested here. Loops run in test_every_step and test_pipeline_scan, checkpoints in one process.
OF_GRAPHS := $(filter-out $(addprefix tests/graph/test_,$(addsuffix .py,deferrable experts halves layers recompute render split_scan \
    stages)), \
    $(wildcard tests/graph/test_*.py))
OF_VERSIONS := $(OF_GRAPHS) $(addprefix tests/test_,$(addsuffix .py,package quickstart readme)) \
    tests/verify/test_compile.py tests/verify/test_pipeline.py \
    $(addprefix tests/sharding/test_,$(addsuffix .py,all_primitives coverage rules)) \
    $(addprefix tests/runtime/test_,$(addsuffix .py,effects every_step hlo host_memory kernels mapped pipeline pipeline_scan scattered \
    step)) tests/runtime/checkpoints/test_checkpoints.py
version-test: $(INSTALLED)
	$(PYTEST) -m "not slow" $(OF_VERSIONS)

test-all: $(INSTALLED)
	$(PYTEST)

# In a folder of its own: nothing else shall see a GPU plugin.
$(GPU_COMPILER)/.installed: $(INSTALLED)
	@echo "Installing the compiler for GPUs, once."
	@rm -rf $(GPU_COMPILER)
	@release=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("jax"))') && \
	    $(BIN)/python -m pip install --quiet --no-deps --target $(GPU_COMPILER) \
	    jax-cuda12-plugin==$$release jax-cuda12-pjrt==$$release nvidia-cuda-nvcc-cu12
	@touch $@

verify-test: $(GPU_COMPILER)/.installed
	PYTHONPATH='$(abspath $(GPU_COMPILER))' $(PYTEST) tests/verify/test_gpu.py $(if $(ONLY),-k '$(ONLY)')

# What MaxText imports and does not declare, likewise in a folder of its own. MaxText itself has no release for this JAX: give the
# folder of its sources, of August 2026.
$(MAXTEXT_PACKAGES)/.installed: $(INSTALLED)
	@echo "Installing what MaxText needs, once."
	@rm -rf $(MAXTEXT_PACKAGES)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(MAXTEXT_PACKAGES) \
	    aqtp array_record chex cloudpickle datasets dill drjax einshape fastapi grain immutabledict jinja2 markupsafe ml_collections \
	    mpmath multiprocess omegaconf opentelemetry-api pandas pathwaysutils portpicker pyarrow qwix regex safetensors sentencepiece \
	    starlette sympy tiktoken tokamax toolz transformers 'typeguard<3' uvicorn xxhash
	@touch $@

maxtext-test: $(MAXTEXT_PACKAGES)/.installed
	@test -d '$(MAXTEXT)/src/maxtext' || { echo "MAXTEXT=$(MAXTEXT): no folder with src/maxtext: give that of MaxText's sources"; exit 2; }
	PYTHONPATH='$(abspath $(MAXTEXT))/src:$(abspath $(MAXTEXT_PACKAGES))' $(BIN)/python -m pytest tests/interop/test_maxtext.py

# A browser for Python, likewise in a folder of its own: only what looks at pages needs it.
$(BROWSER)/.installed: $(INSTALLED)
	@echo "Installing a browser, once."
	@rm -rf $(BROWSER)
	@$(BIN)/python -m pip install --quiet --target $(BROWSER) PySide6-WebEngine
	@touch $@

page-test: $(BROWSER)/.installed
	PYTHONPATH='$(abspath $(BROWSER))' $(BIN)/python -m pytest tests/report/test_page_in_browser.py

all-options: $(INSTALLED)
	$(BIN)/python -m typer aliquot.cli._app utils docs --name aliquot --title 'All commands and options' \
	    --output docs/all-options.md

pictures: $(BROWSER)/.installed
	PYTHONPATH='$(abspath $(BROWSER))' $(BIN)/python tests/browser/pictures.py

# Stubs of NumPy are written for the Python that it is installed for.
PYTHON_VERSION = $(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --python-version $(PYTHON_VERSION)
	$(BIN)/mypy --python-version $(PYTHON_VERSION) --config-file benchmarks/mypy.ini benchmarks

# Not those that need a folder of figures, a revision, other packages or the compiler for GPUs; each says how to run it.
BENCHMARKS := $(filter-out %_deviceless.py %/published_steps.py %/third_party_steps.py %/aceso_accuracy.py %/aceso_search.py %/aceso_imports.py %/pipeline_suite.py %/calibrate_gpu.py %/against_revision.py %/maxtext_specs.py %/read_steps.py %/alpa_suites.py,$(wildcard benchmarks/[a-z]*.py))

# Small cases of suites beside the plain step, compared with a recorded result.
bench-small: $(INSTALLED)
	$(BIN)/python benchmarks/small_cases.py --check benchmarks/results/small_cases_cpu-2core_2026-11.json

# Rows that are in the folder are not made again. SUITES="gpt.perf_test_auto ..." takes some, LIMIT=10min gives each plan more time.
LIMIT = 40s
SUITES = $(shell $(BIN)/aliquot bench list --json | $(BIN)/python -c 'import json, sys; print(*(s["suite"] for s in json.load(sys.stdin)["suites"]))')

bench-alpa: $(INSTALLED)
	@set -e; for suite in $(SUITES); do echo "== $$suite"; $(BIN)/aliquot bench alpa "$$suite" --predict --time-limit $(LIMIT) --out "bench-alpa/$$suite"; done

bench: $(INSTALLED)
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script"; done

# In environments of its own: nothing of this one may help.
release-check:
	.ci/release-check

docs: $(DOCS_INSTALLED)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-* dist build site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
