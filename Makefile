# `make demo` shows layertap at work, `make test` tests it. Both need Python 3.11+, make and the package registries.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST := build/transformers-5.17
CONTRACTS := build/contracts
TRAINERS := speculators specforge modelopt automodel
EXAMPLE := .layertap/example

LANES ?= 2
PORT ?= 4200
S3_PORT ?= 8333

PACKAGES := layertap tasks flows deployments
SOURCES := $(PACKAGES) tests demo benchmarks examples

# Nothing that runs from here reports to anybody, and no model comes from a hub.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export HF_HUB_DISABLE_TELEMETRY := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test system contracts check fix example bench soak clean help

help:  ## say what can be made
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' $(MAKEFILE_LIST)

demo: $(READY)  ## extract a small real dataset through the whole stack, check it and show where it is
	$(BIN)/python demo/demo.py --lanes $(LANES) --port $(PORT) --s3-port $(S3_PORT)

test: $(READY) $(OLDEST)/.ready  ## the tests, and those of the engine again on the oldest transformers
	$(BIN)/python -m pytest -m "not debian and not long"
	PYTHONPATH="$(CURDIR)/$(OLDEST)" $(BIN)/python -m pytest tests/test_target.py tests/test_extract.py tests/test_compiled.py \
	    tests/test_forward_bench.py

system: $(READY)  ## the tests that `test` leaves out: on Debian's postgresql and chromium, and the longest ones
	$(BIN)/python -m pytest -m "debian or long"

contracts: $(TRAINERS:%=$(CONTRACTS)/%/.ready)  ## trainers' own readers and losses, in their released packages, on our roots and files
	rm -rf $(CONTRACTS)/roots
	$(BIN)/python -m tests.contracts.roots $(CONTRACTS)/roots
	@set -e; for trainer in $(TRAINERS); do \
	    PYTHONPATH="$(CURDIR)/$(CONTRACTS)/$$trainer:$(CURDIR)" $(BIN)/python -m pytest \
	        --confcutdir=tests/contracts --timeout=600 tests/contracts/$${trainer}_contract.py; \
	done

check: $(READY)  ## linter, formatter, types, imports
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy --strict -p layertap
	$(BIN)/mypy -p tasks -p flows -p deployments
	$(BIN)/lint-imports

fix: $(READY)  ## what the linter and the formatter can mend
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

example: $(READY)  ## train a small drafter on a root, and on wrong states, and plot what it costs
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[examples]' --no-build-isolation
	$(BIN)/python examples/smollm2_root.py $(EXAMPLE)
	test -e $(EXAMPLE)/map.pt || \
	    $(BIN)/layertap vocab-map $(EXAMPLE)/root --draft-vocab 3072 --out $(EXAMPLE)/map.pt
	$(BIN)/python examples/compare_drafters.py $(EXAMPLE)/root $(EXAMPLE)/map.pt $(EXAMPLE)/outcomes \
	    --live 40 --plot docs/drafter.png

bench: $(READY)  ## ratios of writing, the engine, planning, reading and, on a GPU, the forward pass, in a quarter of an hour
	@mkdir -p build
	$(BIN)/layertap bench --json build/bench.json

soak: $(READY)  ## runs through a failing network whose lanes are killed at random, some of them under Prefect; an hour
	$(BIN)/python -m tests.soak
	$(BIN)/python -m tests.soak --slow
	$(BIN)/python -m tests.soak --workers

clean:  ## end the demo's stack, and remove all that was made here
	if [ -x $(BIN)/layertap ] && [ -d .layertap ]; then $(BIN)/layertap down --state .layertap; fi
	rm -rf .layertap build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): constraints.txt demo/requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	    sys.exit(f"layertap needs Python 3.11 or newer, $(PYTHON) is {v}: make PYTHON=python3.12" \
	    if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt hatchling editables
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[demo,dev]'
	$(BIN)/python -m pip install -q --no-deps --no-compile --require-hashes -r demo/requirements.txt
	@touch $@

# What a trainer needs of other versions than ours lies in a folder of its own, in front of our environment.
$(CONTRACTS)/%/.ready: tests/contracts/%.txt | $(READY)
	rm -rf $(@D)
	$(BIN)/python -m pip install -q --no-deps --target $(@D) -r $<
	@touch $@

# Beside transformers only the hub's client differs: 5.17 refuses its second major version.
$(OLDEST)/.ready: | $(READY)
	$(BIN)/python -m pip install -q --no-deps --target $(OLDEST) transformers==5.17.0 huggingface-hub==1.33.0
	@touch $@
