# For developers. Users need scripts/serve and scripts/test only.

PORT ?= 8000
BIN := .venv/bin
NATIVE_SOURCES = $(shell find native -name '*.h' -o -name '*.c' -o -name '*.cc')
SPELLED = src tests native scripts requirements examples benchmarks docs README.md Makefile

.PHONY: setup serve test check check-native bench bench-transfer format

setup:
	scripts/setup dev

serve:
	scripts/serve --port $(PORT)

test:
	scripts/test

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell $(SPELLED)
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)
	$(BIN)/pytest -q tests/policy

# The native tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer.
check-native: setup
	native/tests/run asan
	native/tests/run tsan

# Wants a quiet machine; each target prints its own table.
bench: bench-transfer

bench-transfer: setup
	$(BIN)/pdserve bench-transfer

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE_SOURCES)
