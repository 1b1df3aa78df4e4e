# The two commands: make demo, make test. The rest is for people who work on tracegrad.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fast test-long controls check install lock

install:
	@$(PYTHON) scripts/install.py

demo: install  ## the main job, end to end, on this machine (about five minutes)
	@exec $(BIN)/python -m examples.shop.demo

test: install  ## everything that CI runs; real vLLM, about 15 minutes on two cores
	$(BIN)/python -m pytest -m "not slow"

test-fast: install  ## no vLLM, under a minute
	$(BIN)/python -m pytest -m "not slow and not vllm"

test-long: install  ## the long forms too
	$(BIN)/python -m pytest

controls: install  ## three seeds rise; learning rate 0 and shuffled rewards do not (long form)
	@exec $(BIN)/python -m examples.shop.controls

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock:
	scripts/lock.sh
