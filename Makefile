# make run    makes .venv, installs, and runs the embedded model in a budget that its experts do not fit
# make test   installs what the tests need and runs all of them. STRICT=1: fails where Debian's packages for arm64 and
#             for counting instructions are missing, instead of saying so
# make lint   format and lint only

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := $(shell find csrc headrace -name '*.cc' -o -name '*.h' -o -name '*.py') CMakeLists.txt pyproject.toml
CPP_FILES := $(shell find csrc tests/cpp -name '*.cc' -o -name '*.h')

.PHONY: run test lint cpp-test arm64-test count-test py-test stub clean

PROMPT ?= And the LORD spake unto Moses, saying,
export PROMPT

# The budget: the smallest that works, and room for three tenths of the experts.
run: $(VENV)/.installed
	@budget=$$($(BIN)/headrace inspect tiny -c 256 --json | $(BIN)/python -c 'import json, sys; \
	  plan = json.load(sys.stdin)["plan"]; print(plan["minimum_bytes"] + plan["expert_bytes"] * 3 // 10)') && \
	echo "headrace run tiny -n 200 --temp 0.6 --seed 1 --memory $$budget -p \"$$PROMPT\"" && \
	$(BIN)/headrace run tiny -n 200 --temp 0.6 --seed 1 --memory $$budget -p "$$PROMPT"

$(VENV)/.installed: $(SOURCES)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing headrace into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.tested: $(SOURCES)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.installed

test: lint cpp-test arm64-test count-test py-test

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

# Exit status 77: this machine lacks something, and a line has said what.
unless_missing = || { [ $$? = 77 ] && [ -z "$(STRICT)" ]; }

arm64-test: $(VENV)/.tested
	@PATH="$(CURDIR)/$(BIN):$$PATH" tests/cpp/run.sh arm64 $(unless_missing)

count-test: $(VENV)/.tested
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/kernel_counts.py $(unless_missing)

# Two processes: most tests wait for one child or one thread.
py-test: $(VENV)/.tested
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The types of the native module, for mypy. Run after changing csrc/bindings.
stub: $(VENV)/.tested
	$(BIN)/python -m nanobind.stubgen -q -m headrace._core -o headrace/_core.pyi
	sed -i 's/^from headrace._core import kernels as kernels/kernels: Any  # for tests/; s/import Annotated,/import Annotated, Any,/' headrace/_core.pyi
	$(BIN)/ruff format -q headrace/_core.pyi

clean:
	rm -rf $(VENV) build build-*
