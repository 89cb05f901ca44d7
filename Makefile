# Everything runs through .venv, which `make setup` fills from requirements/dev.txt.
PYTHON ?= python3
JOBS ?= $(shell nproc)
WORLD_SIZES ?= 1 2 3 4

BIN := .venv/bin
PY := $(BIN)/python
CMAKE := $(BIN)/cmake
SETUP := .venv/.setup-done

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup build build-all test test-cpp test-python test-distributed test-wide asan gpu-sanitize lint format demo bench docs clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-26s%s\n", $$1, $$2}'

setup: $(SETUP) ## .venv with the pinned requirements; nothing is done twice

$(SETUP): requirements/dev.txt requirements/test.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dmuon needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@# A .pth file makes python/ importable in .venv; the library is built into python/dmuon/lib.
	$(PY) -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "dmuon-checkout.pth").write_text(str(pathlib.Path("python").resolve()) + "\n")'
	touch $@

build: setup ## the C++ library, into python/dmuon/lib
	$(CMAKE) --preset library --log-level=WARNING
	$(CMAKE) --build --preset library --parallel $(JOBS)

build-all: setup
	$(CMAKE) --preset release --log-level=WARNING
	$(CMAKE) --build --preset release --parallel $(JOBS)

test: test-cpp test-python test-distributed ## all tests: C++, Python and distributed

test-cpp: build-all ## C++ tests and examples, through CTest
	OMP_NUM_THREADS=1 $(BIN)/ctest --preset release --parallel $(JOBS)

test-python: build ## Python tests in one process
	$(PY) -m pytest tests/python

test-distributed: build ## distributed tests, one launch per world size
	@for n in $(WORLD_SIZES); do \
	  echo "== distributed tests on $$n ranks"; \
	  OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $$n -m pytest -x --tb=short -p no:cacheprovider tests/distributed || exit 1; \
	done

test-wide: build ## HSDP on 6 and 8 ranks (2x3, 2x4, 4x2)
	@for n in 6 8; do \
	  echo "== HSDP tests on $$n ranks"; \
	  OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $$n -m pytest -x --tb=short -p no:cacheprovider \
	    tests/distributed/test_hsdp_correctness.py tests/distributed/test_hsdp_async_correctness.py \
	    tests/distributed/test_reproducible.py -k "fp32-z3 or power_of_two or bytes" || exit 1; \
	done

asan: setup ## C++ tests under the address and undefined-behaviour sanitizers
	$(CMAKE) --preset asan --log-level=WARNING
	$(CMAKE) --build --preset asan --parallel $(JOBS)
	OMP_NUM_THREADS=1 $(BIN)/ctest --preset asan --parallel $(JOBS)

gpu-sanitize: build-all ## kernels under compute-sanitizer, tiles of every width among them; needs a Hopper GPU
	for tool in memcheck racecheck; do \
	  DMUON_REQUIRE_GPU=1 compute-sanitizer --tool $$tool --error-exitcode 1 build/release/tests/cpp/dmuon_tests \
	    --gtest_filter='NewtonSchulzOnGpu.GivesTheSameBits*:*TakesTallSquareAndSmall*:*MuonStepAgreesWithTheCpu:PeerSumOnGpu.*' || exit 1; \
	done

lint: setup ## format, lint, size limits and the arrows between rooms
	$(PY) tools/lint.py

format: setup ## format C++ and Python in place
	$(PY) tools/lint.py --fix

demo: build ## train a small GPT on 4 ranks: FSDP2+AdamW, then dmuon's Muon
	$(PY) examples/train_gpt.py

bench: build-all ## C++ benchmarks
	@for program in build/release/bench/cpp/dmuon_*; do \
	  if [ -x $$program ] && [ -f $$program ]; then $$program || exit 1; fi; \
	done

docs: setup ## the documentation site, into site/
	$(PY) -m mkdocs build --strict

clean: ## remove everything that was built; .venv stays
	rm -rf build site dist python/dmuon/lib
