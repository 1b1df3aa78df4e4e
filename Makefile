# The two commands: make demo, make test. The rest is for people who work on tracegrad.
PYTHON ?= python3
BIN := .venv/bin

# Images for containers like to set it. Packages are installed without byte code: each process would
# compile what it imports again, which doubles the CPU time of a vLLM's start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo live test test-fast test-frameworks test-long bench-proxy bench-store bench-trainer bench-kills bench-rollouts bench-scale soak gpu-check \
	controls cli-agent sql-agent multi-agent distillation check docs install install-dev lock dist sbom test-packages image

install:  ## what the demo needs
	@$(PYTHON) scripts/install.py

install-dev:  ## and what tests and checks need
	@$(PYTHON) scripts/install.py --dev

demo: install  ## the main job, end to end, on this machine (three to five minutes)
	@exec $(BIN)/python -m examples.shop.demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10
# Three processes of one thread each for two cores, since a third of a test is waiting; whichever is
# done first takes half of what another has left.
SIDE_BY_SIDE := $(PYTEST) -n 3 --dist worksteal
# Files stay whole, since each process starts a vLLM of its own, and the longest come first.
FILE_BY_FILE := $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

test: test-fast  ## all that CI runs: then client libraries, CLI agents and the real vLLM; some 40 minutes on two cores
	$(SIDE_BY_SIDE) -m "not (slow or frameworks)" tests/clients tests/frameworks
	$(FILE_BY_FILE) -m "(vllm or agents or docker) and not slow" tests/integration tests/faults tests/agents

test-fast: install-dev  ## no vLLM, no CLI agents, no containers, no client libraries' own suites
	$(SIDE_BY_SIDE) -m "not (slow or vllm or agents or docker or packages)" --ignore=tests/clients --ignore=tests/frameworks

test-frameworks: install-dev  ## every agent framework's example, each in a Python of its own; some ten minutes the first time
	$(FILE_BY_FILE) tests/frameworks

test-packages: install-dev  ## the wheel on every Python from 3.11 to 3.14 that can be found (TRACEGRAD_PYTHONS: paths of more)
	$(BIN)/python -m pytest -m packages tests/packages

test-long: test  ## the long forms too, and every agent framework's example
	$(FILE_BY_FILE) -m frameworks tests/frameworks
	$(BIN)/python -m pytest -m slow

bench-proxy: install-dev  ## this proxy beside a plain pass-through and LiteLLM's; writes docs/bench-proxy.md
	@exec $(BIN)/python -m bench.proxy

bench-store: install-dev  ## the store in SQLite and PostgreSQL: turns a second, bytes, loading; writes docs/bench-store.md
	@exec $(BIN)/python -m bench.store

bench-trainer: install-dev  ## one optimizer step beside a plain PyTorch loop and TRL's; writes docs/bench-trainer.md
	@exec $(BIN)/python -m bench.trainer

bench-kills: install-dev  ## the demo's task while its processes are killed, 105 times; writes docs/bench-kills.md
	@exec $(BIN)/python -m bench.kills

bench-rollouts: install-dev  ## rollouts a minute under four schedules (HARBOR_PYTHON: one with harbor), what a rollout takes; writes docs/bench-rollouts.md
	@exec $(BIN)/python -m bench.rollouts $(if $(HARBOR_PYTHON),--harbor-python $(HARBOR_PYTHON))

bench-scale: install-dev  ## a simulated day of 10,000 agents through the proxy and both databases, its first bottleneck; writes docs/bench-scale.md
	@exec $(BIN)/python -m bench.scale

soak: install-dev  ## half an hour of the demo's task with chat traffic in all dialects beside it; writes docs/bench-soak.md
	@exec $(BIN)/python -m bench.soak

gpu-check: install  ## where a GPU is at hand: kernels, speed, memory, checkpoints, serving; goes on where it stopped; writes docs/gpu-check.md (ARGS: options, such as --budget-s 540)
	@exec $(BIN)/python -m bench.gpu_check $(ARGS)

live: install  ## a chat service learns from late thumbs; an exploit is noticed and undone: three seeds and a control
	@exec $(BIN)/python -m examples.live

controls: install  ## three seeds rise; learning rate 0 and shuffled rewards do not (long form)
	@exec $(BIN)/python -m examples.shop.controls

cli-agent: install-dev  ## mini-swe-agent, unmodified, learns in Docker sandboxes: three seeds rise, two controls do not
	@exec $(BIN)/python -m examples.cli_agent

sql-agent: install-dev  ## a LangGraph agent learns to write SQL: three seeds rise, two controls do not
	@exec $(BIN)/python -m examples.sql_agent

distillation: install-dev  ## a student imitates a teacher's traces, recorded through LiteLLM, and learns from its own rewards then
	@exec $(BIN)/python -m examples.distillation

multi-agent: install-dev  ## two agents on one task, of which one is trained
	@exec $(BIN)/python -m examples.multi_agent

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install-dev  ## the site of docs/, in .cache/site; ends with an error at any warning, such as a dead link
	@$(PYTHON) scripts/install.py --dev --docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lock:
	scripts/lock.sh

TOOLS := .cache/tools
$(TOOLS)/.installed: requirements/tools.txt
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install -q --no-deps --require-hashes -r $<
	@touch $@

dist: $(TOOLS)/.installed  ## the sdist and the wheel
	rm -rf dist
	$(TOOLS)/bin/python -m hatchling build -d dist

# Of what the proxy's image holds; without pip, which is none of it.
SBOM := .cache/sbom
sbom: dist  ## dist/tracegrad.cdx.json: packages, versions and licences of an installed tracegrad[proxy,postgres], as CycloneDX
	$(PYTHON) -m venv --clear --without-pip $(SBOM)
	$(TOOLS)/bin/python -m pip --python $(SBOM)/bin/python install -q --no-deps --require-hashes -r requirements/proxy.txt
	$(TOOLS)/bin/python -m pip --python $(SBOM)/bin/python install -q --no-deps --no-index dist/*.whl
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --output-format JSON -o dist/tracegrad.cdx.json $(SBOM)/bin/python

image:  ## the proxy's image, tracegrad; the trainer's: docker build --target trainer .
	docker build -t tracegrad .
