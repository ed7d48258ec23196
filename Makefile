# make demo   set up and run the main job: runs/demo
# make test   set up, lint, check types and run every test
#
# PYTHON      the interpreter that .venv is made from (3.11 or later)
# PYTEST_ARGS options for pytest (default: -n auto, a process a core), for example "-k metrics"

PYTHON ?= python3
PYTEST_ARGS ?= -n auto

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
USE_EXTRAS := demo,moses,tensorboard
TEST_EXTRAS := $(USE_EXTRAS),ctranslate2,plot,ray,zstd,dev

.PHONY: demo test clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-use
	$(BIN)/python -m docnmt demo --out runs/demo

test: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict bertfused docnmt backtranslation unsup bertgen
	$(BIN)/python -m pytest $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps are written last, so an interrupted installation is taken up again.
$(VENV)/installed-use: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[$(USE_EXTRAS)]"
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[$(TEST_EXTRAS)]"
	@touch $@ $(VENV)/installed-use

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or later is needed, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "name one that is, for example: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
