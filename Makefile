# Everything runs in .venv, made from the locked dependencies; nothing but Python 3.11 or newer is needed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench proto chart lock clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## Make the virtual environment

$(VENV)/.installed: requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: install ## Run agent sessions through a real Envoy and the picker (ARGS="--seconds 30 --json")
	@$(BIN)/thunderagent demo $(ARGS)

test: install ## Run the tests (ARGS="-k replay")
	$(BIN)/python -m pytest $(ARGS)

lint: install ## Check style, types and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: install ## Put the code into its style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: install ## Measure, print tables and keep JSON under bench/results (ARGS for one benchmark)
	$(BIN)/python -m bench $(ARGS)

FEED := epp/thunderagent_epp/feed/capacity_feed
proto: install ## Generate the capacity feed's code from its .proto
	$(BIN)/python -m grpc_tools.protoc --proto_path=epp --python_out=epp --pyi_out=epp --grpc_python_out=epp $(FEED).proto
	@for file in $(FEED)_pb2.pyi $(FEED)_pb2_grpc.py; do \
	  { echo '# mypy: ignore-errors'; cat $$file; } > $$file.new && mv $$file.new $$file || exit 1; done

chart: install ## Generate what the charts have from the code: schema of the values, Envoy's configuration, CRD
	$(BIN)/python charts/chart_files.py

COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-emit-package thunderagent-epp --custom-compile-command "make lock"
lock: install ## Renew the locked dependencies: of everything, of the image, of its wheel
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) --all-extras pyproject.toml --group build --output-file requirements-dev.lock
	$(COMPILE) --extra operator pyproject.toml --constraint requirements-dev.lock --output-file requirements.lock
	$(COMPILE) --group build --constraint requirements-dev.lock --output-file requirements-build.lock

clean: ## Remove what the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache bench/results
