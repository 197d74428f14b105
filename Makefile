# The commands of this project. `make serve` and `make test` work from a fresh clone.

PYTHON ?= python3
VENV := .venv
PYTEST ?= $(VENV)/bin/pytest
# Options of the app for `make serve`, as in: make serve ARGS="gamma=2 dtype=float32"
ARGS ?=

# Random cases of each property test for `make fuzz`.
CASES ?= 5000

.PHONY: install serve test test-gpu check format bench fuzz proto

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

serve: install
	@$(VENV)/bin/tandem serve $(ARGS)

# Two processes: one runs the app, the other begins with everything else.
test: install
	$(PYTEST) --numprocesses 2 --dist loadscope

# Runs where there is a CUDA device and neither Ray nor this environment:
#   make test-gpu PYTEST="python3 -m pytest"
test-gpu:
	$(PYTEST) -o addopts= -o filterwarnings=default -m gpu tests/workers

check: install
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTEST) --quiet tests/test_architecture.py

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: install
	$(VENV)/bin/tandem bench $(ARGS)

# The round loop under random faults, and requests at the edge of the schema.
fuzz: install
	$(PYTEST) --quiet --cases $(CASES) tests/deployments/router/test_loop_properties.py
	$(VENV)/bin/tandem fuzz --cases $(CASES)

proto: install
	$(VENV)/bin/python -m deployments.api.proto
	$(VENV)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. deployments/api/tandem.proto
