# The two commands of the README are `make demo` and `make test`; each sets up everything it needs.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

.PHONY: demo test bench lint clean

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

test: lint
	@$(BIN)/python -m pytest

bench: $(READY)
	@$(BIN)/python benchmarks/train.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache dist
