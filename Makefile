# The two commands of the README are `make demo` and `make test`; each sets up everything it needs.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
ETCD   := $(VENV)/etcd/etcd
PEERS  ?= .venv-peers

.PHONY: demo test test-1 test-2 quick quick-1 quick-2 fuzz fuzz-1 fuzz-2 simulate bench bench-peers lint clean

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Shoal and its tools into $(VENV) (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/shoal train examples/digits.py --workers 2
	@$(BIN)/shoal verify examples/digits.py --workers 1,2,3 --steps 40

lint: $(READY)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# For the tests of the store: the distribution's etcd, unpacked without being installed. Without it they are skipped.
$(ETCD): | $(READY)
	@echo "fetching etcd-server into $(VENV)/etcd"
	@place=$$(mktemp -d) && \
	(cd $$place && (apt-get download etcd-server || (apt-get update && apt-get download etcd-server)) && \
	dpkg -x etcd-server_*.deb .) >$$place/log 2>&1 && mkdir -p $(@D) && mv $$place/usr/bin/etcd $@ || \
	echo "no etcd: there is no package to be had here ($$(tail -n 1 $$place/log)); its tests are skipped"; \
	rm -rf $$place

# Tests that start processes wait more than they compute: two halves at once, every other file in each.
test: quick $(if $(shell command -v etcd),,$(ETCD))
	@$(MAKE) --no-print-directory -j 2 test-1 test-2

PROCESS_TESTS = ls tests/ranks/test_*.py tests/runs/test_*.py tests/faults/test_*.py tests/docs/test_*.py

test-1: $(READY)
	@$(BIN)/python -m pytest $$($(PROCESS_TESTS) | sed -n 'p;n')

test-2: $(READY)
	@$(BIN)/python -m pytest $$($(PROCESS_TESTS) | sed -n 'n;p')

# Lint, types and every test that starts no process: every other file in one pytest, the rest in another.
quick: $(READY)
	@$(MAKE) --no-print-directory -j 2 -O quick-1 quick-2 lint

QUICK_TESTS = ls tests/pure/test_*.py tests/fuzz/test_*.py

quick-1: $(READY)
	@$(BIN)/python -m pytest $$($(QUICK_TESTS) | sed -n 'p;n')

quick-2: $(READY)
	@$(BIN)/python -m pytest $$($(QUICK_TESTS) | sed -n 'n;p')

# Every parser that reads from network or disk, 100,000 changed inputs each; FUZZ_SEED=1 for others.
fuzz: export FUZZ_CASES ?= 100000
fuzz: export FUZZ_SEED ?= 0
fuzz: $(READY)
	@$(MAKE) --no-print-directory -j 2 -O fuzz-1 fuzz-2

fuzz-1: $(READY)
	@$(BIN)/python -m pytest --durations=0 tests/fuzz/test_fuzz_network.py

fuzz-2: $(READY)
	@$(BIN)/python -m pytest --durations=0 tests/fuzz/test_fuzz_files.py tests/fuzz/test_fuzz_keys.py

simulate: $(READY)
	@$(BIN)/python -m shoal.testing.simulation --first $(or $(FIRST),0) --seeds $(or $(SEEDS),100000)
	@$(BIN)/python -m shoal.testing.simulation --servers --first $(or $(FIRST),0) --seeds $(or $(SERVER_SEEDS),20000)

bench: $(READY)
	@$(BIN)/python benchmarks/train.py

# Peers of benchmarks/paramserver.py, in an environment of their own: nothing of theirs gets into Shoal's.
bench-peers: $(PEERS)/.installed

$(PEERS)/.installed:
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "installing TensorFlow and Ray into $(PEERS) (a minute or two, 2.6 GB)"
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.*' 'tensorflow-cpu==2.21.*' 'ray==2.60.*'
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) runs .pytest_cache .mypy_cache .ruff_cache dist
