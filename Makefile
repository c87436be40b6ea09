VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
MODEL  := build/demo-model
MESON  := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/meson
PYTEST := $(BIN)/python -m pytest -n 2 --basetemp=build/pytest
DEMO   := $(BIN)/coli run --expert-slots 25% --max-tokens 60 --seed 3
, := ,
READING := $(patsubst %,tests/unit/memory/test_%.py,expert_store faults mirrors prefetch pressure readers several_threads)
# `make check SUITE=` leaves the tests out.
SUITE  ?= suite

SOURCES := pyproject.toml meson.build $(shell find src native -type f \
  \( -name '*.py' -o -name '*.[ch]' -o -name '*.in' -o -name '*.cdef' -o -name meson.build \
  -o -path 'src/colibri/bundled/[!.]*' \) \
  ! -path src/colibri/_build.py)

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

ifneq ($(wildcard src/colibri/bundled/colibri.json),)
demo: $(VENV)/.installed ## install, then run a model with room for a quarter of its experts
	$(DEMO) "And the LORD spake unto Moses, saying, Speak unto"
	$(DEMO) "She was very glad to hear that"
	$(DEMO) "Um das Paket zu installieren, müssen Sie"
else
demo: $(VENV)/.installed $(MODEL)/colibri.json
	$(DEMO) --model $(MODEL) "The hummingbird is"
endif

test: $(VENV)/.dev native suite ## install what the tests need and run the fast ones

check: $(VENV)/.dev native lint $(SUITE) ## format, lint, types, layers, then the fast tests

clients: $(VENV)/.dev ## install further clients and try them against the server
	$(PIP) install 'langchain-openai>=0.3' 'litellm>=1.60' 'schemathesis>=4.3' \
	  'llm>=0.27' 'huggingface-hub>=0.30'
	$(PYTEST) -m slow tests/unit/server/test_other_clients.py tests/unit/server/test_schemathesis.py

native: $(VENV)/.dev ## build the kernels in place (build/meson, linked into src/colibri)
	@test -f build/meson/build.ninja || $(MESON) setup build/meson
	@$(MESON) compile -C build/meson
	@cp build/meson/_build.py src/colibri/_build.py
	@rm -f src/colibri/_native.abi3.so
	@! test -f build/meson/native/_native.abi3.so || \
	  ln -s ../../build/meson/native/_native.abi3.so src/colibri/_native.abi3.so

oracle: $(VENV)-oracle/.installed ## compare goldens and random configs with transformers (installs torch)
	PYTHONPATH=src $(VENV)-oracle/bin/python tools/make_goldens.py --check
	PYTHONPATH=src $(VENV)-oracle/bin/python tools/check_switches.py

# A build under a sanitizer (1: folder, 2: sanitizers, 3: optimization, 4: further flags), its package in build/1/root.
define sanitized
	@test -f build/$(1)/build.ninja || CC=gcc CFLAGS="-g1 $(4)" $(MESON) setup build/$(1) --buildtype=plain \
	  -Doptimization=$(3) -Db_sanitize=$(2) -Db_lundef=false -Dpython.purelibdir=/ -Dpython.platlibdir=/
	@DESTDIR=$(CURDIR)/build/$(1)/root $(MESON) install -C build/$(1) --quiet
	@rm -f build/$(1)/report.*
endef

# What it finds goes to files, because pytest keeps what tests print: any of them is a failure.
REPORTED = { cat build/$(1)/report.* 2> /dev/null && exit 1; true; }
SANITIZED_PYTEST = $(PYTEST) -o pythonpath="build/$(1)/root ." --ignore tests/kernels/test_steady_state.py

sanitize: $(VENV)/.dev ## run the kernel and reader tests under AddressSanitizer and UBSan (needs gcc)
	$(call sanitized,sanitize,address$(,)undefined,1,-fno-sanitize-recover=undefined -fno-sanitize=object-size$(,)null)
	@status=0; LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0:log_path=build/sanitize/report \
	  UBSAN_OPTIONS=print_stacktrace=1:log_path=build/sanitize/report \
	  $(call SANITIZED_PYTEST,sanitize) tests/kernels $(READING) || status=$$?; $(call REPORTED,sanitize); exit $$status

# No suppressions: Python and NumPy are not instrumented, and OpenBLAS gets no threads of its own. ThreadSanitizer of gcc 12
# wants addresses of at most 28 random bits.
FIXED := $(shell test "$$(cat /proc/sys/vm/mmap_rnd_bits 2> /dev/null || echo 28)" -le 28 || echo setarch -R)

tsan: $(VENV)/.dev ## run the same under ThreadSanitizer (needs gcc)
	$(call sanitized,tsan,thread,2,)
	@status=0; $(FIXED) env LD_PRELOAD=$$(gcc -print-file-name=libtsan.so) OPENBLAS_NUM_THREADS=1 \
	  TSAN_OPTIONS=die_after_fork=0:log_path=build/tsan/report \
	  $(call SANITIZED_PYTEST,tsan) --hypothesis-profile=brief tests/kernels $(READING) || status=$$?; \
	  $(call REPORTED,tsan); exit $$status

# gcc 12's cross compiler may fail on -O2 of this program's main, hence -O1; the kernels are what is looked at.
NEON := build/neon
CHECK := native/neon_check.c native/kern.c native/dispatch.c native/pool.c
STRICT := -std=gnu17 -Inative -ffp-contract=off -fno-math-errno -pthread -static

neon: ## compare the bits of the NEON kernels with the generic ones (needs gcc-aarch64-linux-gnu and qemu-user)
	@mkdir -p $(NEON)
	gcc $(STRICT) -O1 -DISA=generic -DCHECKED_TABLE=colibri_table_generic $(CHECK) -o $(NEON)/generic -lm
	aarch64-linux-gnu-gcc $(STRICT) -O2 -march=armv8.2-a+dotprod+fp16 -DISA=generic -DCHECKED_TABLE=colibri_table_generic \
	  $(CHECK) -o $(NEON)/dotprod -lm
	$(NEON)/generic > $(NEON)/generic.txt
	qemu-aarch64 -cpu max $(NEON)/dotprod > $(NEON)/dotprod.txt
	cmp $(NEON)/generic.txt $(NEON)/dotprod.txt
	@echo "NEON: the bits of `wc -l < $(NEON)/generic.txt` results are those of the generic kernels"

clean: ## remove everything that was built, the virtual environments too
	rm -rf build dist $(VENV) $(VENV)-oracle src/colibri/_build.py src/colibri/_native* src/colibri/bundled/.coli_usage
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests tools native -name __pycache__ -type d -prune -exec rm -rf {} +

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

suite:
	$(PYTEST)

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Colibri needs Python 3.11 or newer (Debian 12: apt install python3)."; \
	  echo "Where it has another name: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "This Python cannot make a virtual environment (Debian: apt install python3-venv)."; exit 1; }
	$(PYTHON) -m venv $*

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) install .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP) install ".[dev]"
	@touch $@

$(VENV)-oracle/.installed: pyproject.toml | $(VENV)-oracle/bin/python
	$(PIP:$(VENV)/%=$(VENV)-oracle/%) install ".[oracle]" torch==2.13.0
	@touch $@

$(MODEL)/colibri.json: tools/make_checkpoint.py | $(VENV)/.installed
	@rm -rf $(MODEL)
	$(BIN)/python tools/make_checkpoint.py $(MODEL)

.NOTPARALLEL:
.PHONY: help demo test check native clients oracle sanitize tsan neon clean lint suite
.SECONDARY:
