# On a fresh machine, run `make demo` or `make test`; both install what they need.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint bench fuzz docs clean

demo: $(INSTALLED)  ## train four methods on the built-in data and write an HTML page
	$(BIN)/metabridge demo --out demo

# Each worker uses one compute thread, since waiting OpenMP threads of several processes would take each other's cores.
test: lint  ## style, types and all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

lint: $(INSTALLED)  ## style, types and the layers of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml --no-cache

bench: $(INSTALLED)  ## compare with other libraries; BENCH=results keeps the numbers
	mkdir -p $(or $(BENCH),demo)
	$(BIN)/python benchmarks/maml.py --json $(or $(BENCH),demo)/bench-maml-cpu.json
	$(BIN)/python benchmarks/flat.py --json $(or $(BENCH),demo)/bench-flat-cpu.json
	$(BIN)/python benchmarks/heads.py --json $(or $(BENCH),demo)/bench-heads-cpu.json

fuzz: $(INSTALLED)  ## read damaged and hostile files of every kind; continues an interrupted run. FUZZ=results keeps the counts
	$(BIN)/python -m fuzz --out demo/fuzz --json $(or $(FUZZ),demo)/fuzz.json

docs: $(INSTALLED)  ## write the numbers of results/*.json into README and docs
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv demo

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
