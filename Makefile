# Needs only Python 3.11 or newer (with venv and pip) and make. Every target first makes `.venv`, once.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.installed-docs
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench docs clean

help:
	@echo "make demo      plan and train a small GPT on 8 virtual devices (DATA=path for your own text)"
	@echo "make test      the tests, without those marked slow"
	@echo "make test-all  every test, full tables of combinations included"
	@echo "make lint      formatting, lint and types"
	@echo "make bench     every benchmark script, each writing a dated result"
	@echo "make docs      the documentation as a site, in site/"
	@echo "make clean     remove .venv, caches and build products"

# The stamp is written last, so that an interrupted installation is taken up again.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "aliquot needs Python 3.11 or newer, found %d.%d; name another with: make PYTHON=python3.12" % v[:2])'
	@echo "Installing into .venv, once; this takes a few minutes."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --editable '.[zoo,plot,test,dev]'
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

.venv: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/aliquot demo $(if $(DATA),--data '$(DATA)')

test: $(INSTALLED)
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED)
	$(PYTEST)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	@set -e; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

docs: $(DOCS_INSTALLED)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv dist build site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
