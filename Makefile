# Everything a new checkout needs: python3 (3.11 or newer) and make. `make demo` and `make test` set up by themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO := runs/demo

.PHONY: help setup demo test check format clean

help:
	@echo "make demo    train on scikit-learn's digits, evaluate, and write a release (a few minutes)"
	@echo "make test    run the tests"
	@echo "make check   lint, types and formatting"
	@echo "make format  format the code"
	@echo "make clean   remove the environment and the demo's run"

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 2; }
	@echo "Setting up the environment in .venv"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	@echo "Training on 1,498 of scikit-learn's 8x8 digits under differential privacy"
	@rm -rf $(DEMO)
	$(BIN)/dp-sinkhorn train digits --preset digits --epsilon 10 --out $(DEMO)
	@echo "Evaluating on the 299 digits that were held out"
	$(BIN)/dp-sinkhorn evaluate $(DEMO)/release --against digits --count 3000 --json $(DEMO)/private/evaluation.json
	@echo "Done. The picture: $(DEMO)/release/samples.png. What it guarantees: $(DEMO)/release/CARD.md"

test: $(READY)
	@echo "Running the tests"
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv $(DEMO)
