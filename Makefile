# The two commands: `make serve` and `make test`. Everything is installed into .venv, once; a stamp tells what is there.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first Python 3.11 or 3.12 that runs and can make environments. `make PYTHON=/path/to/python3.12 test` takes another.
PYTHON ?= $(shell for one in python3.11 python3.12 python3; do $$one -c \
  'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1 && echo $$one && break; done)
# On a terminal pip shows what it does.
PIP := $(BIN)/python -m pip --disable-pip-version-check $(if $(MAKE_TERMOUT),,-qq)
# Its builds differ by machine, so it is not in the lock, and its version stands in one place.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# In the versions of the extra `ray`.
RAY_PACKAGE := $(shell sed -n 's/^ray = \["\(ray[^;"]*\).*/\1/p' pyproject.toml)
UV := uv==0.13.9
CPP := $(wildcard plugins/cpu_native/csrc/*.cpp plugins/cpu_native/csrc/*.h benchmarks/*.cpp)
SITE := .site-venv
TRANSFER := .transfer
RAY := .ray
CONFIG ?= examples/quickstart.yaml
# One more than two cores have: a worker often waits for a server or a command that it has started.
JOBS ?= 3
# Bytecode is kept, whatever the environment says: workers and commands by the hundred would compile the same files again.
RUN := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m
PYTEST := $(RUN) pytest --timeout 900
# The slowest ten are printed: a feature may add 40 seconds to `make test`, and 4 minutes to `make test-full`.
SUITE := $(PYTEST) -n $(JOBS) --durations 10 --durations-min 1
# Runs $(2), and says how long it took, whatever came of it. $(1): the minutes that it may take.
timed = @start=$$(cut -d. -f1 /proc/uptime); ($(2)); status=$$?; taken=$$(($$(cut -d. -f1 /proc/uptime) - start)); \
  echo "make $@: $$((taken / 60)) min $$((taken % 60)) s, limit $(1) min on two idle cores"; exit $$status

.PHONY: help setup serve check house test test-one test-full soak gpu-test clients transfer-packages ray lint format typecheck docs site bench lock gpu-wheels clean \
  distclean

help:
	@echo 'make serve       start the server with $(CONFIG)'
	@echo 'make check       format, lint, types and house rules (under a minute)'
	@echo 'make test        the test suite'
	@echo 'make test-one NAME=cache_radix   the tests of one plugin or module'
	@echo 'make test-full   the whole matrices, which make test leaves out'
	@echo 'make soak        twenty thousand requests to one server, and whatever else needs time'
	@echo 'make gpu-test    the tests that need a GPU; python -m benchmarks.gpu measures it'
	@echo 'make clients     other authors'\'' clients, installed under .clients, with one server (a few minutes)'
	@echo 'make transfer-packages   transfer engines that are wheels of their own, installed under .transfer (about 700 MB)'
	@echo 'make ray         ranks and replicas on Ray, installed under .ray, on two nodes of this machine (about 250 MB, a few minutes)'
	@echo 'make site        the documentation as a site, in site/'
	@echo 'make lint typecheck format docs bench lock gpu-wheels clean distclean'

setup: $(STAMP)

# The lock first, by its hashes and nothing else; torch is then content with what it finds, but for a CUDA build's libraries.
$(STAMP): pyproject.toml setup.py requirements.lock
	@test -n "$(PYTHON)" || { echo 'No Python 3.11 or 3.12 with venv found; say which: make PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'make setup: installing into $(VENV), a few minutes the first time'
	@echo '1 of 5: an environment of $(PYTHON)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2 of 5: $$(grep -c '^[A-Za-z0-9]' requirements.lock) packages of requirements.lock"
	@$(PIP) install --require-hashes --no-deps -r requirements.lock
	@echo '3 of 5: $(TORCH), the largest package'
	@$(PIP) install '$(TORCH)'
	@echo '4 of 5: Pegboard itself, from this folder'
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@echo '5 of 5: the native runner, compiled for this machine'
	@$(BIN)/python -m pegboard.plugins.cpu_native || true
	@touch $(STAMP)

# Versions stay as they are where they can; `make lock LOCK_ARGS=--upgrade` takes the newest. The second one, for images, has
# the packages of a server alone, in the same versions.
LOCK := $(BIN)/uv pip compile -q pyproject.toml --universal --python-version 3.11 --generate-hashes --no-annotate \
  --no-emit-package torch --system-certs --custom-compile-command 'make lock'
lock: $(STAMP)
	@$(PIP) install $(UV)
	$(LOCK) --group setup --group dev --extra server --extra otel --extra redis --extra conformance --extra triton --extra video \
	  --extra xgrammar --extra lab --output-file requirements.lock $(LOCK_ARGS)
	@cp requirements.lock deploy/requirements.lock
	$(LOCK) --group image --extra server --extra otel --extra redis --extra video --output-file deploy/requirements.lock

serve: $(STAMP)
	$(BIN)/pegboard serve $(CONFIG)

# All three, whatever the first ones find, on two cores.
check: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target lint typecheck house

house: $(STAMP)
	$(PYTEST) -q -n 0 -m 'not full' tests/house

# The tests of a plugin or a module, by the name of its folder or file.
test-one: $(STAMP)
	@paths=$$($(BIN)/python -m tests.house.find $(NAME)) && $(PYTEST) -n 0 -m 'not gpu and not soak and not clients and not transfer_packages and not ray' $$paths $(PYTEST_ARGS)

# Without the house rules, which are `make check`'s.
test: $(STAMP)
	$(call timed,5,$(SUITE) --dist loadfile --ignore tests/house \
	  -m 'not full and not gpu and not soak and not clients and not transfer_packages and not ray' $(PYTEST_ARGS))

# Its files are few and long, so idle workers take tests from the others. Then the numeric tests of `make test` with the
# other instruction sets of this machine, which tests/numeric.py lists.
test-full: $(STAMP)
	$(call timed,20,$(SUITE) --dist worksteal -m 'full and not gpu and not soak and not clients and not transfer_packages and not ray' $(PYTEST_ARGS); \
	  matrices=$$?; $(RUN) tests.numeric -n $(JOBS) --timeout 900 && exit $$matrices)

# SOAK_REQUESTS=2000 sends fewer.
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m 'soak and not gpu' --timeout 14400 --hypothesis-profile explore tests $(PYTEST_ARGS)

# Where there is a GPU, with a torch that was built for it: any Python that has the packages of the server and pytest will do, and no
# test here needs the packages of others. Warnings of other versions of libraries are not errors there.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_TESTS := tests/plugins/attn_triton tests/plugins/attn_flashinfer tests/plugins/sampler_triton tests/plugins/linear_triton tests/plugins/memory_paged \
  tests/plugins/memory_host tests/toolkit tests/core/worker/test_worker.py tests/plugins/media/test_encode_times.py tests/e2e/test_gpu_engine.py
gpu-test:
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -p no:cacheprovider -o filterwarnings=default -m gpu --timeout 900 $(GPU_TESTS) $(PYTEST_ARGS)

# The newest that go together, apart from .venv and from each other; the AI SDK needs npm and node besides.
clients: $(STAMP)
	@$(PIP) install $(UV)
	$(BIN)/python -m tests.e2e.third_party_clients.install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m clients --timeout 900 \
	  tests/e2e/test_third_party_clients.py tests/e2e/test_router.py tests/e2e/test_router_pairs.py $(PYTEST_ARGS)

# Beside .venv, whose packages they see. NIXL without its dependencies, which are a torch for CUDA and a second wheel.
transfer-packages: $(STAMP)
	@test -x $(TRANSFER)/bin/python || $(BIN)/python -m venv $(TRANSFER)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" > \
	  "$$($(TRANSFER)/bin/python -c 'import site; print(site.getsitepackages()[0])')/pegboard.pth"
	@$(TRANSFER)/bin/python -m pip --disable-pip-version-check -qq install --no-deps \
	  'nixl>=1.5,<2' 'nixl-cu12>=1.5,<2' 'mooncake-transfer-engine-non-cuda>=0.3.13,<0.4'
	UCX_NET_DEVICES=lo OMP_NUM_THREADS=1 $(TRANSFER)/bin/python -m pytest -n 0 -m transfer_packages --timeout 300 \
	  tests/plugins/transfer_nixl tests/plugins/transfer_mooncake tests/faults/test_disagg_packages.py $(PYTEST_ARGS)

# Ray, beside .venv as well, but for one package of the tests: each of Ray's processes would build a grammar for 3 s by it, by way of
# jsonschema, which can do without. Ray's statistics stay here.
ray: $(STAMP)
	@test -x $(RAY)/bin/python || $(BIN)/python -m venv $(RAY)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" > \
	  "$$($(RAY)/bin/python -c 'import site; print(site.getsitepackages()[0])')/pegboard.pth"
	@echo 'raise ImportError' > "$$($(RAY)/bin/python -c 'import site; print(site.getsitepackages()[0])')/rfc3987_syntax.py"
	@$(RAY)/bin/python -m pip --disable-pip-version-check -qq install '$(RAY_PACKAGE)'
	RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest -n 0 -o filterwarnings=default -m ray --timeout 600 \
	  tests/plugins/launch_ray tests/parallel/test_ray.py tests/parallel/test_ray_serve.py $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

# Two workers: in a fresh clone all of `make check` takes 41 s instead of 75. On a busy machine they may start too late for
# mypy, which then ends with an error of its own: status 2, as for what it cannot read, where wrong types give 1.
typecheck: $(STAMP)
	@$(BIN)/mypy --num-workers 2 || { test $$? -eq 2 && echo 'mypy ended with status 2; once more, without workers' && $(BIN)/mypy; }

docs: $(STAMP)
	$(BIN)/python -m docs._build.config docs/config.md
	$(BIN)/python -m docs._build.models docs/models.md
	$(BIN)/python -m docs._build.coming_from docs/coming-from.md
	$(BIN)/python -m docs._build.board docs/images
	$(BIN)/python -m benchmarks.chart docs/images

# In an environment of its own, which the tests do not need.
site: $(STAMP)
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip --disable-pip-version-check -qq install "pip>=25.1" && \
	  $(SITE)/bin/python -m pip --disable-pip-version-check -qq install --group docs
	$(BIN)/python docs/_build/reference.py docs/reference
	$(SITE)/bin/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python benchmarks/decode.py $(BENCH_ARGS)

# For a GPU machine without an index that has torch, transformers, triton, numpy and pytest, on Python 3.12. There:
#   pip install --no-index --no-deps .whl/*.whl && pip install --no-index --no-deps --no-build-isolation -e .
GPU_WHEELS := annotated-doc annotated-types anyio backports-zstd fastapi gguf h11 httpcore httptools httpx llguidance markdown-it-py mdurl \
  msgspec opentelemetry-api pluggy psutil pydantic pydantic-core pyzmq rich shellingham sniffio starlette typer typing-extensions \
  typing-inspection uvicorn uvloop
# FLASHINFER=0.7.2.post1 adds FlashInfer, without what its attention kernels do not need.
FLASHINFER_WHEELS = { scratch=$$(mktemp -d) && $(PIP) download --quiet --no-deps --dest $$scratch flashinfer-python==$(FLASHINFER) && \
  $(PIP) download --quiet --no-deps --dest .whl --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 apache-tvm-ffi && \
  $(BIN)/python -m benchmarks.gpu.flashinfer_slim $$scratch/*.whl .whl; status=$$?; rm -rf $$scratch; exit $$status; }
gpu-wheels: $(STAMP)
	@rm -rf .whl && mkdir .whl
	@awk -v names='$(GPU_WHEELS)' 'BEGIN {split(names, list, " "); for (i in list) wanted[list[i]]} \
	  /^[^ ]/ {split($$0, entry, "=="); on = entry[1] in wanted} on' requirements.lock > .whl/requirements.lock
	@$(PIP) download --require-hashes -r .whl/requirements.lock --dest .whl --no-deps --only-binary :all: \
	  --implementation cp --python-version 3.12 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64
	@test -z '$(FLASHINFER)' || $(FLASHINFER_WHEELS)
	@du -sh .whl
	@test "$$(du -sm .whl | cut -f1)" -lt 60 || { echo 'over 60 MB together' >&2; exit 1; }

clean:
	rm -rf build dist reports site docs/reference ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find pegboard core toolkit plugins conformance tools tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(SITE) $(TRANSFER) .whl .clients
