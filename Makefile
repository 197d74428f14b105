# The commands of this project: `make` alone lists them. `make serve` and `make test` work from a fresh clone.

PYTHON ?= python3
VENV := .venv
# Clients bring some sixty packages with them.
COMPAT_VENV := .venv-compat
PYTEST ?= $(VENV)/bin/pytest
# Options of the app for `make serve`, as in: make serve ARGS="gamma=2 dtype=float32"
ARGS ?=
# Random cases of each property test for `make fuzz`.
CASES ?= 5000
PROPERTIES := $(addprefix tests/,deployments/router/test_loop_properties.py deployments/router/drafting/test_lookup.py \
	deployments/router/drafting/test_context_tree.py workers/test_retokenized.py)
COMBINATIONS := $(addprefix tests/deployments/,test_combinations.py router/test_loop_exactness.py router/test_grammars.py \
	router/policy/test_gamma.py router/policy/test_gamma_beside_prompts.py router/drafting/test_chain.py) \
	$(addprefix tests/cluster/,test_model_size.py test_tensor_parallel.py) \
	$(addprefix tests/workers/,test_first_layers.py test_quantizing.py)

.DEFAULT_GOAL := help
.PHONY: help install serve test compat test-gpu gpu-report check format docs bench fuzz proto

help: ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' | awk -F'|' '{printf "make %-10s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## make .venv with the exact versions of constraints.txt

$(VENV)/.installed: EXTRAS := test,quantization
$(VENV)/.installed: pyproject.toml constraints.txt
$(COMPAT_VENV)/.installed: EXTRAS := test,compat
$(COMPAT_VENV)/.installed: pyproject.toml constraints.txt constraints-compat.txt
$(VENV)/.installed $(COMPAT_VENV)/.installed:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(patsubst %,--constraint %,$(filter %.txt,$^)) --editable ".[$(EXTRAS)]"
	touch $@

serve: install ## serve the bundled pair, or other models: make serve ARGS="target=... draft=..."
	@$(VENV)/bin/tandem serve $(ARGS)

# Two processes: one runs the app, the other begins with everything else.
test: install ## run the test suite, or a part: make test ARGS="tests/workers -k sampling"; no network, no GPU
	$(PYTEST) --numprocesses 2 --dist loadscope --no-loadscope-reorder $(ARGS)

compat: $(COMPAT_VENV)/.installed ## try clients that people have, in .venv-compat: make compat ARGS="-k openai"
	$(COMPAT_VENV)/bin/pytest tests/compat $(ARGS)

test-gpu: ## run the worker tests that need a CUDA device: make test-gpu PYTEST="python3 -m pytest"
	$(PYTEST) -o addopts= -o filterwarnings=default -m gpu tests/workers

gpu-report: ## measure the workers on a CUDA device in under 5 minutes, without Ray: make gpu-report PYTHON=python3
	$(PYTHON) -m tandem gpu-report $(ARGS)

check: install ## check formatting, lint, types, warnings of C++, architecture and docs
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python .ci/cpp_warnings.py
	$(PYTEST) --quiet tests/test_architecture.py tests/test_docs.py

format: install ## format the source
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: install ## write the tables of the docs that mirror the source
	$(VENV)/bin/python .ci/docs.py

bench: install ## measure draft lengths on one live app, or another subject: make bench ARGS="engine"
	$(VENV)/bin/tandem bench $(ARGS)

fuzz: install ## put the round loop under random faults, then send requests at the edge of the schema by HTTP and gRPC
	$(PYTEST) --quiet --cases $(CASES) $(PROPERTIES)
	$(PYTEST) --quiet --all-combinations $(COMBINATIONS)
	$(VENV)/bin/tandem fuzz --cases $(CASES)
	$(VENV)/bin/tandem fuzz --wire grpc --cases $(CASES)

proto: install ## regenerate the gRPC code after a change of tandem.proto
	$(VENV)/bin/python -m deployments.api.proto
	$(VENV)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. deployments/api/tandem.proto
