# A fresh machine needs only Python 3.11 and make. `make train` and `make test` set up the environment themselves.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TRAIN_READY := $(VENV)/.train-ready
READY := $(VENV)/.ready
RELEASE := $(VENV)/release
RELEASE_READY := $(RELEASE)/.ready
ROS2_READY := $(VENV)/ros2/.ready

# Tests and trainings start many processes. Without .pyc files, each process would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all check fuzz docs audit sbom format clean help

help:
	@echo "make train     set up, train Walker2D, print the path of its learning curve"
	@echo "make test      set up, run all tests except the slow ones"
	@echo "make test-all  set up, run every test"
	@echo "make check     set up, ruff, mypy --strict, bandit and the document checks"
	@echo "make fuzz      set up, feed mutated bytes to each reader for 15 s (x86-64)"
	@echo "make docs      set up, build the documentation site in build/site, check its links"
	@echo "make audit     set up, fail if a package has a known vulnerability"
	@echo "make sbom      set up, list the packages in build/sbom.json (CycloneDX)"
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

# The tests of `td3-robot ros2` need rclpy. In an environment with rclpy's wheels, each Python process starts twice: the
# first start only sets the library paths. So rclpy gets a separate environment. If rclpy cannot be installed, these
# tests are skipped.
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
	$(BIN)/mypy --python-version 3.10 --no-warn-return-any  # numpy's types for 3.10 are less exact
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive td3_robot sims
	$(BIN)/python docs/produce.py --check
	$(BIN)/python benchmarks/results/report.py --check

# The fuzzer exits with an error at the first defect.
FUZZ_SECONDS ?= 15
fuzz: $(READY)
	$(PIP) --editable '.[fuzz]'
	for target in $$(ls tests/fuzz/corpus); do $(BIN)/python tests/fuzz/fuzz.py $$target $(FUZZ_SECONDS) || exit 1; done

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The tools of a release have many requirements, so they have a separate environment.
$(RELEASE_READY): Makefile
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.9' 'cyclonedx-bom>=7'
	touch $(RELEASE_READY)

# With --strict, pip-audit fails if its database gives no answer about a package. The database knows torch 2.13.0, but
# not the build 2.13.0+cpu, so sed removes the suffix.
audit: $(READY) $(RELEASE_READY)
	mkdir -p build
	$(BIN)/python -m pip --disable-pip-version-check freeze --exclude-editable > build/requirements.txt
	sed -i 's/+[A-Za-z0-9.]*$$//' build/requirements.txt
	$(RELEASE)/bin/pip-audit --strict --no-deps --disable-pip --requirement build/requirements.txt $(AUDIT)

SBOM_OF ?= $(BIN)/python
sbom: $(READY) $(RELEASE_READY)
	mkdir -p build
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom.json $(SBOM_OF)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
