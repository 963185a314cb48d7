# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint bench fuzz docs clean

demo: $(INSTALLED)  ## train four methods on the built-in data and write a page to look at
	$(BIN)/metabridge demo --out demo

test: lint  ## everything that must hold
	$(BIN)/python -m pytest

lint: $(INSTALLED)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## side by side with the peers, in one run; BENCH=results to keep the numbers
	mkdir -p $(or $(BENCH),demo)
	$(BIN)/python benchmarks/maml.py --json $(or $(BENCH),demo)/bench-maml-cpu.json
	$(BIN)/python benchmarks/flat.py --json $(or $(BENCH),demo)/bench-flat-cpu.json
	$(BIN)/python benchmarks/heads.py --json $(or $(BENCH),demo)/bench-heads-cpu.json

fuzz: $(INSTALLED)  ## read damaged and hostile files of every kind; a killed run goes on. FUZZ=results keeps the counts
	$(BIN)/python -m fuzz --out demo/fuzz --json $(or $(FUZZ),demo)/fuzz.json

docs: $(INSTALLED)  ## put the numbers of results/*.json into README and docs
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv demo

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
