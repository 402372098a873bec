# Everything runs in .venv, which each target sets up first. `make demo ARGS="--layers 8"` passes options on.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Two workers of one thread each: tests share the machine, with each other's processes at least. Waiting threads sleep.
WORKERS ?= 2
QUIET := OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1

# Else each process would compile all that it imports: a new one for each command, and for each test that needs one.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-exhaustive lint check wheel-check clean

demo: $(INSTALLED)
	$(BIN)/python examples/finetune_llama.py $(ARGS)

test: $(INSTALLED)
	$(QUIET) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

# All combinations of parameters, and three times as many examples of each property (tests/exhaustive.py).
test-exhaustive: $(INSTALLED)
	LOHAN_EXHAUSTIVE=1 $(QUIET) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test

wheel-check: $(INSTALLED)
	tests/wheel_check.sh $(BIN)/python

# torch comes first and pinned, so that all have the same one. PyPI's wheel for Linux brings CUDA, gigabytes: without a GPU,
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes the one for the CPU.
# What is imported is compiled then; all that is installed would take a core a minute.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt torch==2.13.0 setuptools
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt --no-build-isolation -e '.[dev,hf,plot]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
