# Every target sets itself up: a virtual environment in .venv, with the packages that this target needs, once.
PYTHON ?= python3
RANKS ?= 4
EXAMPLES ?= 2000
ARGS ?=

PY := .venv/bin/python
TORCHRUN := OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --local-addr 127.0.0.1

.DEFAULT_GOAL := help
.NOTPARALLEL:  # two pips must not share one .venv
.PHONY: help train test test-all eco properties faults bench docs check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: .venv/.with-progress,plot ## train the language model: RANKS=4 ARGS="--mesh fsdp=4" (ARGS=--help lists all)
	$(TORCHRUN) --nproc-per-node $(RANKS) examples/train_lm.py $(ARGS)

test: .venv/.with-test ## run the everyday tests, by two workers: ARGS="-k plan"
	$(PY) -m pytest --numprocesses 2 --dist worksteal -m "not slow and not eco" $(ARGS)

test-all: .venv/.with-test ## run what `make test` leaves out, which takes longer
	$(PY) -m pytest --numprocesses 2 --dist worksteal -m "(slow or property) and not rest and not eco" $(ARGS)

eco: .venv/.with-test,eco ## run Ray, Lightning, accelerate, transformers and TRL on our classes, 4 minutes
	$(PY) -m pytest --numprocesses 2 --dist worksteal -m eco $(ARGS)

properties: .venv/.with-test ## run each property of the core on 2,000 drawn examples, 15 minutes: EXAMPLES=20000
	$(PY) -m pytest --numprocesses 2 --dist worksteal -m law --examples $(EXAMPLES) $(ARGS)

faults: .venv/.with-test ## kills, full disks, damage, against other libraries, half an hour: ARGS="--only shardfn"
	$(PY) tests/slow/faults/faults.py $(ARGS)

bench: .venv/.with-progress,plot ## run every benchmark, 20 minutes: ARGS=--quick, ARGS="--only step host"
	$(PY) examples/benchmarks/run.py $(ARGS)

docs: .venv/.with-docs ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

check: .venv/.with-check,eco ## lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

clean: ## remove .venv, site and caches; runs/ stays
	rm -rf .venv site build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/.with-a,b stands for "extras a and b are installed"; it is made again when a version changes.
.venv/.with-%: .venv/.created pyproject.toml constraints.txt
	@echo "setting up .venv with shardfn[$*], once"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "shardfn needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv --clear .venv
	@touch $@
