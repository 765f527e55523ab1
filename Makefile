# make demo and make test need Python 3.11 or newer with its venv module, and nothing else.
PYTHON ?= python3
VENV ?= .venv
# Any requirement pip takes, with options: TORCH="torch" for the newest, or TORCH="torch --index-url URL" for another build.
TORCH ?= torch==2.13.0

# Processes that share the tests, file by file: one more than two cores, as a quarter of their time tests wait for others.
JOBS ?= 3
# Those that share tests of kernels as plain Python, which never wait.
CORES ?= 2

# Flags for tierstore demo.
DEMO ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Parts of a target run one after another, also under make -j: they share two cores and one terminal.
.NOTPARALLEL:
.PHONY: help demo test pytest suite kernels-without-jit lint format docs peers bench-quick clean distclean
help:
	@echo "make demo         train a model on tables that do not fit in the memory budget (under 3 minutes);"
	@echo "                  by ranks: make demo DEMO='--ranks 2'"
	@echo "make test         the whole test suite, the kernels again as plain Python, ruff and mypy"
	@echo "make lint         ruff and mypy only"
	@echo "make bench-quick  every benchmark at small size: whether it works"
	@echo "make peers        other systems that benchmarks and tests compare with, into .peers"
	@echo "make docs         write the tables of README.md and docs from bench/results, and the API reference into .docs"
	@echo "make clean        remove what was built and what the examples left; make distclean also removes $(VENV)"

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "tierstore needs Python 3.11 or newer; set PYTHON, as in: make PYTHON=python3.12 test"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/tierstore demo $(DEMO)

# Tests under limits of memory or file descriptors want kernels that are compiled. mypy leaves cores to the compiler.
# The suite comes last so that its closing line ends the output.
test: $(READY)
	@$(BIN)/tierstore compile & $(MAKE) --no-print-directory lint; status=$$?; wait $$! && exit $$status
	@$(MAKE) --no-print-directory kernels-without-jit
	@$(MAKE) --no-print-directory suite

pytest: $(READY)
	$(BIN)/tierstore compile
	@$(MAKE) --no-print-directory suite

# OpenMP's threads of several processes would wait for each other, spinning. Slow files begin first (tests/conftest.py).
# Processes find each other's bytecode, also where an image says that none is to be written.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
suite: $(READY)
	$(PYTEST) --numprocesses $(JOBS)

# Only the files that have such tests are imported.
kernels-without-jit: $(READY)
	NUMBA_DISABLE_JIT=1 $(PYTEST) --numprocesses $(CORES) -m "kernel and not soak" --quiet --durations=3 \
	  $$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.kernel' tests)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Outside the environment: what they say they need is not what tierstore may need.
TORCHREC := torchrec==1.9.2 tensordict torchmetrics==1.0.3 pyre-extensions pyvers cloudpickle typing_inspect
FRAMEWORKS := lightning==2.6.6 lightning-utilities accelerate==1.15.0 pyyaml huggingface_hub requests charset_normalizer urllib3
PEERS ?= fbgemm-gpu-cpu==1.8.0 rocksdict==0.3.29 libcachesim==0.3.5 $(TORCHREC) $(FRAMEWORKS)
peers: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .peers $(PEERS)

docs: $(READY)
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.reference

bench-quick: $(READY)
	$(BIN)/python -m bench --quick

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .demo .bench .docs
	rm -rf bag-store bag.pt dlrm-store sasrec-store vectors vectors.hot plan.html sharded-store tower-data tower-store tower.toml  # of examples/README.md
	find tierstore bench docs tests -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .peers
