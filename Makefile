# `make help` lists what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
export PATH := $(CURDIR)/launch/bin:$(CURDIR)/.venv/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv
.DEFAULT_GOAL := help
.PHONY: help setup setup-test lock wheels train test test-all launchers portability kill-test attack gpu-check versions lint format equivalence bench bench-quick mutants startup soak docs site clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: ## makes .venv with what training needs; nothing to do the second time
	@launch/setup train

setup-test: ## adds what tests, linters and the documentation need
	@launch/setup test

# As many tests at a time as there are cores, from 2 to 8. A test has two ranks more often than not, so two of them use 80 % of two
# cores (35 s together, 22 s alone); with three the suite was not quicker.
WORKERS = $(shell cores=$$(nproc); echo $$((cores < 2 ? 2 : cores > 8 ? 8 : cores)))
PYTEST = python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

train: setup ## one file, two engines: trains ds_configs/zero3.json with DeepSpeed and with Horovod and compares the two
	@launch/two-engines $(ARGS)

test: lint ## lint, then a test of every promise, some at a time; `make test WORKERS=0` takes them one after another
	$(PYTEST) -m "not long"

test-all: lint ## lint, then every test, with the long matrices too: for the night
	$(PYTEST)

lock: ## writes constraints.txt anew: versions for every Python of pyproject.toml
	python3 launch/lock.py

wheels: setup ## puts all that `make train` installs into the folder wheels, for a machine without a network
	pip download -c constraints.txt -c .setup/torch.txt --no-build-isolation -d wheels '.[deepspeed,vision]' setuptools wheel hatchling editables cmake cffi cloudpickle packaging psutil pyyaml
	pip download --no-deps --no-build-isolation --no-binary horovod -d wheels "$$(grep '^horovod==' constraints.txt | cut -d' ' -f1)"

launchers: setup-test ## the matrix: every engine under every launcher, two processes, the same losses (6 minutes)
	$(PYTEST) -n 0 tests/engines/test_launchers.py -k cells

portability: setup-test ## save under every engine, go on under others (10 minutes; every pair: python -m tests.portability --whole)
	python -m tests.portability

kill-test: setup-test ## kills a random rank at a random moment, 207 times, and compares what comes out (an hour and a half)
	python -m tests.attack --minutes 120 --tries 23 --only "killed rank, restarted on deepspeed" --only "killed rank, restarted on horovod" --only "killed rank, restarted on ddp"

attack: setup-test ## attacks trainings, disks, clocks, ports and files for half an hour: the table of docs/attacks.md
	python -m tests.attack

gpu-check: setup-test ## every engine and launcher on this machine's GPUs in short trainings: a table, a verdict, a file (10 minutes)
	dsframe doctor --train

versions: setup-test ## the Pythons and versions of torch that are declared: tests, trainings, the table of docs/support.md (15 minutes)
	python -m tests.versions

lint: setup-test ## format, style and types
	ruff format --check .
	ruff check .
	mypy

format: setup-test ## rewrites the sources as `make lint` wants them
	ruff format .
	ruff check --fix .

equivalence: setup-test ## every engine beside one process, losses and weights: the tables of docs/promise.md (more than an hour)
	python -m tests.equivalence

bench: setup-test ## dsframe beside hand-written loops, Accelerate, Lightning and the HF Trainer, in turns: ratios, memory, losses
	python -m pip install -q --no-build-isolation -c constraints.txt -c .setup/torch.txt -e '.[bench]'
	python -m benchmarks.compare

bench-quick: setup-test ## bounds that hold on a busy machine too: the time of a check, what ranks ask and send by their number (2 minutes)
	python benchmarks/check_startup.py
	python -m benchmarks.many_ranks --ranks 2,16

mutants: setup-test ## puts each bug of tests/mutants.json into a copy of the code: its tests must fail
	python -m tests.mutants --jobs $(WORKERS)

startup: setup-test ## from the command to the first step, warm and without compiled ops, beside scripts written by hand (10 minutes)
	python -m benchmarks.startup
	python -m benchmarks.startup --engines zero1,zero3 --cold

soak: setup-test ## 5,000 steps on four engines: memory, and the speed beside a run that has just begun (15 minutes)
	python -m benchmarks.soak

docs: setup-test ## rewrites the pages of docs/ that follow from the code, and the editors' schema
	python docs/generate.py

site: setup-test ## the documentation as a site, in build/site; to read it: python -m http.server -d build/site
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

clean: ## takes away everything that setup, tests and runs have made here, but not your runs
	rm -rf .venv .setup .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
