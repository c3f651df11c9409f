# make run    makes .venv, installs, and runs the embedded model in a budget that its experts do not fit
# make test   installs what the tests need and runs all of them
# make lint   format and lint only

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := $(shell find csrc headrace -name '*.cc' -o -name '*.h' -o -name '*.py') CMakeLists.txt pyproject.toml
CPP_FILES := $(shell find csrc tests/cpp -name '*.cc' -o -name '*.h')

.PHONY: run test lint cpp-test py-test clean

run: $(VENV)/.installed
	@$(BIN)/python -m headrace.demo

$(VENV)/.installed: $(SOURCES)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing headrace into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.tested: $(SOURCES)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.installed

test: lint cpp-test py-test

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/mypy

# The core's own tests, three times: as shipped, under address and undefined-behaviour sanitizers, under the
# thread sanitizer.
cpp-test: $(VENV)/.tested
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/cpp/run.sh plain
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/cpp/run.sh address,undefined
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/cpp/run.sh thread

py-test: $(VENV)/.tested
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build build-*
