# Every target sets up all that it needs, in .venv, from a bare Python 3.11 or later. A stamp file per set of
# packages makes the second run instant; editing pyproject.toml or this file makes the next run look again.

# The first that works, as a shim of that name may only say that its Python is not installed. 3.11 is tested most.
USABLE := -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
    $$name $(USABLE) 2>/dev/null && echo $$name && break; done)
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet
SOURCES := pyproject.toml Makefile

# Asked for first and by itself, so that a build that is already at hand (one for the CPU alone, say, in a directory
# that pip is told to look in) is taken before any other requirement pulls in another.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

# Without its requirements: it names torchaudio and gradio, and what it needs here is in the extra `clone`.
QWEN_TTS := qwen-tts==0.1.1

# Arguments for the command behind the target: make serve ARGS="--model DIR --port 9000", make test ARGS="-k text"
ARGS ?=

.PHONY: serve test test-full check format bench gpu clean
.DELETE_ON_ERROR:

serve: $(VENV)/serve.stamp
	$(VENV)/bin/qwen3-tts serve $(ARGS)

# One thread a test process: the tests' models are tiny, and threads only cost there.
test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(ARGS)

test-full: $(VENV)/test.stamp
	$(VENV)/bin/python -m pytest -m "" --timeout 3600 $(ARGS)

check: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

format: $(VENV)/test.stamp
	$(VENV)/bin/ruff check --fix --exit-zero .
	$(VENV)/bin/ruff format .

bench: $(VENV)/bench.stamp
	for question in frame stream reference memory; do $(VENV)/bin/python -m benchmarks.$$question $(ARGS) || exit 1; done

# Proof and figures on a CUDA GPU, in less than eight minutes. On a machine that has a torch of its own, and cannot
# or need not install another: python3 -m benchmarks.gpu
gpu: $(VENV)/peers.stamp
	$(VENV)/bin/python -m benchmarks.gpu $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/torch.stamp: $(SOURCES)
	@$(or $(PYTHON),false) $(USABLE) || { echo "no Python 3.11 or later with venv was found: install one (on Debian" \
	    "and Ubuntu: python3 and python3-venv) or name it with make PYTHON=..." >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/serve.stamp: $(VENV)/torch.stamp
	$(PIP) --editable .
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp
	$(PIP) --editable ".[test]"
	$(PIP) --no-deps "$(QWEN_TTS)"
	@touch $@ $(VENV)/serve.stamp

$(VENV)/bench.stamp: $(VENV)/torch.stamp
	$(PIP) --editable ".[bench]"
	$(PIP) --no-deps "$(QWEN_TTS)"
	@touch $@ $(VENV)/serve.stamp

$(VENV)/peers.stamp: $(VENV)/bench.stamp benchmarks/peers.py
	$(VENV)/bin/python -m benchmarks.peers --install
	@touch $@
