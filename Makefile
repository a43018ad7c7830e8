# Every target sets itself up: a fresh machine needs Python 3.11, make and the package registries.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
AZURE  := $(VENV)/azurite/.installed
BROWSE := $(VENV)/axe/.installed
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test check format docs bench soak azurite browser clean

help:            ## list the targets
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 16

install: $(STAMP) ## make .venv with everything that the tests need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TensorForge needs Python 3.11 or newer; PYTHON=... selects one")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing TensorForge and its tools into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	@touch $@

demo: $(STAMP)   ## run the main job
	@$(BIN)/python examples/demo.py

test: $(STAMP) $(BROWSE) ## run the tests
	@$(BIN)/python -m pytest -m "not soak" -n $(JOBS) --dist worksteal -q

check: $(STAMP)  ## lint, formatting, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(STAMP) ## apply the formatter and the safe lint fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP)   ## make the pages and the picture that come from the code
	@$(BIN)/python tools/generate_docs.py

bench: $(STAMP)  ## run every benchmark; each prints our figure, the peer's and the limit
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

soak: $(STAMP) $(AZURE) ## the long randomised tests
	@TENSORFORGE_SOAK=1 $(BIN)/python -m pytest -m soak -n $(JOBS) --dist worksteal --timeout 3600

azurite: $(AZURE) ## a server of Azure's protocol for the long tests

$(AZURE): $(STAMP)
	@if command -v npm > /dev/null; then \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3 && touch $@; \
	else echo "There is no npm: the Azure store will not be tested"; fi

browser: $(BROWSE) ## a Chromium and axe-core for the tests of the dashboard

$(BROWSE): $(STAMP)
	@if ! command -v chromium > /dev/null && command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "Installing Chromium for the tests of the dashboard"; \
	  (apt-get install -qq -y --no-install-recommends chromium || \
	   (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium)) > /dev/null; fi; \
	command -v chromium > /dev/null || echo "THERE IS NO CHROMIUM: the dashboard will not be tested in a browser"
	@if command -v npm > /dev/null; then \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/axe axe-core@4; \
	else echo "THERE IS NO NPM: the accessibility of the dashboard will not be checked"; fi
	@mkdir -p $(@D) && touch $@

clean:           ## remove what the other targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build demo-output
