# SPDX-License-Identifier: Apache-2.0
# `make quickstart` and `make test` do all their set-up; both can be repeated.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
BIN = $(VENV)/bin
RUN ?= runs/quickstart
WORKERS ?= 3
# setuptools warns at each editable install of folders that look like the package.
QUIETLY = PYTHONWARNINGS=ignore

export JAX_PLATFORMS ?= cpu
export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: quickstart cpu3h has-data test test-all lint clean

quickstart: $(VENV)/.base
	$(BIN)/python -m bertjax.train --config=quickstart.py --workdir=$(RUN)
	@echo
	@$(BIN)/python -m bertjax.evaluate --workdir=$(RUN)
	@echo
	@$(BIN)/python -m bertjax.fill_mask --model=$(RUN) \
		"This function returns a [MASK] of strings." \
		"If the file does not [MASK], an error is raised." \
		"The default [MASK] is None." \
		"The shape of the input [MASK]." \
		"Return True if the object is an [MASK] of the class."
	@echo
	@echo "Next:"
	@echo "  $(BIN)/python -m bertjax.fill_mask --model=$(RUN) 'Write a [MASK] of your own.'"
	@echo "  $(BIN)/python -m bertjax.show --config=quickstart.py --batches=3"
	@echo "  $(BIN)/python -m bertjax.train --config=bert.py:mini --workdir=runs/mine \\"
	@echo "      --config.data.train='your/*.txt' --config.data.vocab_size=8192 --config.total.steps=2000"

# The speedrun's track of three hours (docs/speedrun.md); DATA: the folder with its files.
cpu3h: has-data $(VENV)/.base
	$(BIN)/python -m bertjax.speedrun --track=cpu3h --scorer=lm \
		--data="$(DATA)" --workdir=runs/cpu3h
	@$(BIN)/python -m bertjax.fill_mask --model=runs/cpu3h/seed-0 \
		"The capital of France is [MASK]." \
		"He was born in 1950 and [MASK] in 2001." \
		"She opened the [MASK] and went out." \
		"I would like to book a [MASK] for two people." \
		"The children were [MASK] in the garden."

has-data:
	@test -n "$(DATA)" || { echo "error: say DATA=DIR, the files of docs/speedrun.md"; exit 2; }

# The workers, and the commands that tests start, share what is compiled.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist=loadfile

test-all: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist=loadfile --runslow

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.base: pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; say PYTHON=..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(QUIETLY) $(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(QUIETLY) $(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
