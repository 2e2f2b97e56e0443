# Every target is one line to a documented command; CONTRIBUTING.md says what each is for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
COMPILER := $(VENV)/.compiler
TOOLS := .venvs/tools
TOOLED := $(TOOLS)/.installed
PIP := $(BIN)/pip --disable-pip-version-check --quiet install -c constraints.txt

.PHONY: help demo serve test test-large test-kernels test-interpreters check fix proto check-proto monitoring
.PHONY: test-container check-monitoring check-deploy kernels bench

help:
	@echo "make demo | serve | test | test-large | test-kernels | test-container | check | fix | proto | monitoring | kernels | bench (see CONTRIBUTING.md)"

demo: $(INSTALLED)
	$(BIN)/dqkv demo

serve: $(INSTALLED)
	$(BIN)/dqkv serve

test: test-interpreters
	PATH="$(CURDIR)/$(TOOLS)/programs:$$PATH" $(BIN)/pytest tests

test-large: $(INSTALLED)
	$(BIN)/pytest tests/service/test_large.py -m big

test-interpreters: $(INSTALLED)
	$(BIN)/python tests/interpreters.py 3.12 3.13

check: $(INSTALLED) check-proto check-monitoring check-deploy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint

fix: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

GENERATED := service
proto: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(GENERATED) --pyi_out=$(GENERATED) --grpc_python_out=$(GENERATED) --mypy_grpc_out=quiet:$(GENERATED) proto/dqkv/v1/*.proto

# The committed code has to be what proto/ generates: generated again beside it, and compared.
check-proto: $(INSTALLED)
	rm -rf build/proto && mkdir -p build/proto && $(MAKE) --no-print-directory proto GENERATED=build/proto
	diff -r --exclude=__pycache__ --exclude=__init__.py build/proto/dqkv/v1 service/dqkv/v1

MONITORING := deploy
monitoring: $(INSTALLED)
	PYTHONPATH=deploy $(BIN)/python -m monitoring $(MONITORING)

# Likewise alert rules and dashboard, from the metrics that the server declares.
check-monitoring: $(INSTALLED)
	rm -rf build/monitoring && $(MAKE) --no-print-directory monitoring MONITORING=build/monitoring
	diff build/monitoring/prometheus/alerts.yaml deploy/prometheus/alerts.yaml
	diff -r build/monitoring/grafana/dashboards deploy/grafana/dashboards

check-deploy: $(TOOLED)
	deploy/check.sh $(TOOLS) build/k8s

kernels: $(COMPILER)
	$(BIN)/dqkv kernels build

# Compiles every kernel of the default sets without a GPU, about five minutes on two cores; kept while nothing changes.
test-kernels: $(COMPILER)
	$(BIN)/pytest tests/kernels

# Builds the image and runs it: by Docker where its engine answers, else by root with podman, runc and debootstrap.
test-container: $(INSTALLED)
	$(BIN)/pytest tests/container

bench: $(INSTALLED)
	set -e; for script in benchmarks/*.py; do $(BIN)/python "$$script"; done

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dqkv needs Python 3.11 or newer; make PYTHON=... names one")'
	@echo "installing into $(VENV): about a minute, longer where torch comes with CUDA"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e '.[server,client-torch,dev]'
	@touch $@

$(COMPILER): $(INSTALLED)
	$(PIP) --no-build-isolation -e '.[compile,gates]'
	@touch $@

# The validators of check-deploy: on Debian and Ubuntu they come by themselves, elsewhere promtool has to be on the path.
$(TOOLED): deploy/tools.sh deploy/tools.txt
	PYTHON=$(PYTHON) deploy/tools.sh $(TOOLS)
	@touch $@
