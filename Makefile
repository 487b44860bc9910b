# The front door: everything below is a thin call of CMake presets, pytest and the scripts in tools/.
PRESET ?= cpu
PYTEST_ARGS ?=

.PHONY: help demo build test bench lint format clean setup
.DEFAULT_GOAL := help

help:
	@echo "make demo    set everything up, quantize SmolLM2-135M to INT4 and generate text (MAX_NEW_TOKENS=64)"
	@echo "make build   the C++ library and the Python module (PRESET=$(PRESET))"
	@echo "make test    build, then ctest and pytest (PYTEST_ARGS=...)"
	@echo "make bench   the benchmarks, each beside its peer"
	@echo "make lint    formatting, ruff, the rooms of ARCHITECTURE.md"
	@echo "make format  rewrite the sources as lint wants them"
	@echo "make clean   remove build/ and the built module; .venv stays"

setup:
	@tools/setup.sh

build: setup
	@cmake --preset $(PRESET)
	@cmake --build --preset $(PRESET)

demo: build
	@tools/demo.sh

test: build
	@ctest --preset $(PRESET)
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

bench: build
	@tools/bench.sh

lint: setup
	@tools/lint.sh

format: setup
	@tools/lint.sh --fix

clean:
	rm -rf build python/polyop/lib
