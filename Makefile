# Two doors for a fresh machine: `make demo` (the life of a rented cluster, on hosts booted here) and `make test`.
# Both need Linux and root for the hosts; without, `make test` runs the rest and says what it skipped.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := SPOTUNE_CLUSTER=inventory/localcloud/demo.toml
SYSTEM_PACKAGES := systemd-container mmdebstrap nftables iproute2 mount rsync openssh-client e2fsprogs \
  debian-archive-keyring python3-venv

# What only the tests stand on: a browser to look at the report of a run (some 300 MB), a compiler for the imitated card,
# and what nodes have: DeepSpeed's launcher, tools for disks.
TEST_PACKAGES := chromium g++ pdsh fdisk xfsprogs cloud-guest-utils

# A file is one worker's; the longest begin first (tests/conftest.py), where xdist would take those with the most tests.
IN_PARALLEL := --dist loadfile --no-loadscope-reorder

# Python keeps the bytecode of our modules: tests start some thousand programs.
unexport PYTHONDONTWRITEBYTECODE

# torch, oneDNN and MKL each read a switch of their own when they are loaded.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
NO_VECTORS := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE

.PHONY: demo demo-down test proof arithmetic gpu gpu-bundle card quick lint bench storm system

demo: system $(VENV)/control
	$(DEMO) PATH="$(CURDIR)/$(BIN):$$PATH" sh inventory/localcloud/demo.sh

# The hosts and disks that an interrupted demo leaves; a whole one leaves none.
demo-down: $(VENV)/control
	$(DEMO) $(BIN)/fab local.down --yes

test: SYSTEM_PACKAGES += $(TEST_PACKAGES)
test: system $(VENV)/tests
	$(BIN)/pytest $(IN_PARALLEL) --numprocesses 3 -m "not proof"

# What make test leaves out: every model type, every fault at every call, every pair of strategies, parity with TRL, slow
# links, four hosts, other launchers, make gpu on an imitated card; and the whole of tests/stories/test_cycle.py.
proof: SYSTEM_PACKAGES += $(TEST_PACKAGES)
proof: system $(VENV)/tests arithmetic
	$(BIN)/pytest $(IN_PARALLEL) --numprocesses 3 -m "proof or cycle"

# The tests of arithmetic as this processor computes, as one without AVX-512, and as one without vector instructions.
arithmetic: $(VENV)/tests
	failed=0; for processor in "" "$(AVX2)" "$(NO_VECTORS)"; do \
	  env $$processor $(BIN)/pytest $(IN_PARALLEL) --numprocesses 2 -m "torch and not proof and not localcloud" || failed=1; \
	done; exit $$failed

# What only a card can show (tests/gpu/README.md). Where .gpu/ lies it takes this machine's Python with the packages in
# there, else .venv. HOUR has further options, OUT says where results go.
OUT ?= build/gpu
BUNDLE := $(wildcard .gpu)

gpu: card $(if $(BUNDLE),,$(VENV)/tests)
	@$(if $(BUNDLE),$(PYTHON),PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python) tests/gpu/hour.py --out "$(OUT)" $(HOUR)

card:
	@$(PYTHON) tests/gpu/hour.py --card

# Makes .gpu/, for a machine with a card and no network.
gpu-bundle: $(VENV)/train
	@$(BIN)/python tests/gpu/bundle.py

# For a line changed: lint, and what needs neither hosts nor torch nor other processes. Two minutes on two cores.
quick: lint
	$(BIN)/pytest $(IN_PARALLEL) --numprocesses 2 --quick -q

lint: $(VENV)/control
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: system $(VENV)/bench
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.bench.run

# A run through a spot market's storm, with nobody there: most of an hour. Writes storm.json.
storm: system $(VENV)/tests
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.bench.storm

# What the local cloud stands on. Named before it is installed; nothing happens when all is there.
system:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  missing=$$(for p in $(SYSTEM_PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || printf '%s ' $$p; done); \
	  if [ -n "$$missing" ]; then \
	    echo "installing system packages: $$missing"; \
	    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $$missing >/dev/null; \
	  fi; \
	fi

$(VENV)/control: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[dev,aliyun]'
	touch $@

$(VENV)/train: $(VENV)/control
	$(BIN)/pip install -q -e '.[train]'
	touch $@

$(VENV)/tests: $(VENV)/train
	$(BIN)/pip install -q -e '.[kernels,trl]'
	touch $@

$(VENV)/bench: $(VENV)/train
	$(BIN)/pip install -q -e '.[bench]'
	touch $@
