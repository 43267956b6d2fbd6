# A fresh machine needs only Python 3.11 and make. `make train` and `make test` set up the environment themselves.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TRAIN_READY := $(VENV)/.train-ready
READY := $(VENV)/.ready
ROS2_READY := $(VENV)/ros2/.ready

# Tests and trainings start many processes. With .pyc files they do not each compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all check docs format clean help

help:
	@echo "make train     set up, train Walker2D with three processes, print where the curve is"
	@echo "make test      set up, run the tests but the slow ones"
	@echo "make test-all  set up, run every test"
	@echo "make check     set up, ruff, mypy --strict and the document checks"
	@echo "make docs      set up, build the documentation site in build/site, check its links"
	@echo "make format    set up, format the code"
	@echo "make clean     remove the virtual environment and build leftovers"

# What training needs.
$(TRAIN_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[train]'
	touch $(TRAIN_READY)

# What the tests, the checks and the documents need.
$(READY): $(TRAIN_READY)
	$(PIP) --editable '.[dev]'
	touch $(READY)

# rclpy for the tests of `td3-robot ros2`. Its wheels restart every Python process of their environment with other library
# paths, so they have an environment of their own. Without the wheels, these tests are skipped.
$(ROS2_READY): $(READY)
	$(PYTHON) -m venv $(VENV)/ros2
	$(VENV)/ros2/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[ros2-node]' && touch $(ROS2_READY) || echo "rclpy cannot be installed: the tests of td3-robot ros2 are skipped"

train: $(TRAIN_READY)
	$(BIN)/td3-robot train configs/walker2d_fast.yaml

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --maxschedchunk 1 -m "not slow"

test-all: $(READY) $(ROS2_READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --maxschedchunk 1

check: $(READY) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/produce.py --check
	$(BIN)/python benchmarks/results/report.py --check

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
