# The two commands: make demo, make test. The rest is for people who work on tracegrad.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-fast test-long controls check install lock

install:
	@$(PYTHON) scripts/install.py

demo: install  ## the main job, end to end, on this machine (about five minutes)
	@exec $(BIN)/python -m examples.shop.demo

test: test-fast  ## everything that CI runs; then the real vLLM, about 15 minutes on two cores
	$(BIN)/python -m pytest -m "vllm and not slow"

test-fast: install  ## no vLLM, under a minute; files side by side, one thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not vllm" -n 2 --dist loadfile

test-long: test-fast  ## the long forms too
	$(BIN)/python -m pytest -m "vllm or slow"

controls: install  ## three seeds rise; learning rate 0 and shuffled rewards do not (long form)
	@exec $(BIN)/python -m examples.shop.controls

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock:
	scripts/lock.sh
