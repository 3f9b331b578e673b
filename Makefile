# For developers. Users need scripts/serve and scripts/test only.

PORT ?= 8000
BIN := .venv/bin
NATIVE_SOURCES = $(shell find native -name '*.h' -o -name '*.c' -o -name '*.cc')
SPELLED = src tests native scripts requirements examples benchmarks docs README.md Makefile

setup:
	scripts/setup dev

serve:
	scripts/serve --port $(PORT)

test:
	scripts/test

# With `make -k check`, every check runs even when one before it fails.
CHECKS = check-lint check-format check-types check-layers check-spelling check-native-format check-policy
check: $(CHECKS)
$(CHECKS): setup

check-lint:
	$(BIN)/ruff check
check-format:
	$(BIN)/ruff format --check
check-types:
	$(BIN)/pyright
check-layers:
	$(BIN)/lint-imports
check-spelling:
	$(BIN)/codespell $(SPELLED)
check-native-format:
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)
check-policy:
	$(BIN)/pytest -q tests/policy

# The native tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer.
check-native: setup
	native/tests/run asan
	native/tests/run tsan

# Wants a quiet machine; each target prints its own table. `make bench` takes some 45 minutes: docs/benchmarks.md.
bench: bench-two-cores
bench-all: bench-transfer bench-engine bench-serving bench-decoding bench-two-cores

bench-two-cores: setup
	$(BIN)/python benchmarks/two_cores.py --out build/two_cores-$$(date +%Y%m%dT%H%M%S).json

bench-transfer: setup
	$(BIN)/pdserve bench-transfer

bench-engine: setup
	$(BIN)/pdserve bench-engine

bench-serving: setup
	$(BIN)/pdserve bench-serving

bench-decoding: setup
	$(BIN)/pdserve bench-decoding

# Half an hour of load and faults; docs/soak.md.
soak: setup
	$(BIN)/pdserve soak --minutes 30 --json docs/results/soak.json

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

.PHONY: setup serve test check $(CHECKS) check-native bench bench-all bench-two-cores bench-transfer bench-engine bench-serving bench-decoding soak format
