# On a fresh machine with Python 3.11 or later, `make demo` and `make test` do all of their own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -c constraints.txt

.PHONY: demo test lint format docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/hf-multilora demo $(ARGS)

# With what pytest rewrites and Python compiles kept, even where PYTHONDONTWRITEBYTECODE is set: else each of several
# processes does it again, for 20 s.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist worksteal --nbmake $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, into site/. `make docs ARGS=serve` shows it in a browser and follows changes.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs $(or $(ARGS),build --strict)

# The stamps make a second run quick: an extra is installed again only when what it is made from changed.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "constraints.txt holds the set tested on Python 3.11 and later; try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
