# The two commands: make demo, make test. The rest is for people who work on tracegrad.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fast test-long bench-proxy controls check install lock

install:
	@$(PYTHON) scripts/install.py

demo: install  ## the main job, end to end, on this machine (about five minutes)
	@exec $(BIN)/python -m examples.shop.demo

test: test-fast  ## everything that CI runs; then CLI agents and the real vLLM, about 20 minutes on two cores
	$(BIN)/python -m pytest -m "(vllm or agents) and not slow"

test-fast: install  ## no vLLM, no CLI agents; files side by side, one thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not (slow or vllm or agents)" -n 2 --dist loadfile

test-long: test-fast  ## the long forms too
	$(BIN)/python -m pytest -m "vllm or agents or slow"

bench-proxy: install  ## this proxy beside a plain pass-through and LiteLLM's; writes docs/bench-proxy.md
	@exec $(BIN)/python -m bench.proxy

controls: install  ## three seeds rise; learning rate 0 and shuffled rewards do not (long form)
	@exec $(BIN)/python -m examples.shop.controls

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock:
	scripts/lock.sh
