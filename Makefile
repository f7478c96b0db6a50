# `make help` lists what there is.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
export PATH := $(CURDIR)/launch/bin:$(CURDIR)/.venv/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv
.DEFAULT_GOAL := help
.PHONY: help setup train test test-all mpi launchers portability kill-test attack gpu-check versions lint format equivalence footprint bench bench-quick predictions startup soak docs site clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: ## makes .venv with everything in it; nothing to do the second time
	@launch/setup

# As many tests at a time as there are cores, from 2 to 8. A test has two ranks more often than not, so two of them use 80 % of two
# cores (35 s together, 22 s alone); with three the suite was not quicker.
WORKERS = $(shell cores=$$(nproc); echo $$((cores < 2 ? 2 : cores > 8 ? 8 : cores)))
PYTEST = python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

# Two processes; one where there is a single GPU, or CUDA_VISIBLE_DEVICES shows a single one.
PROCESSES = $(shell gpus=$$(launch/gpus); echo $$((gpus == 1 ? 1 : 2)))

train: setup ## one file, two engines: trains ds_configs/zero3.json with DeepSpeed and with Horovod and compares the two
	python -m dsframe.data.fetch fashion-mnist
	deepspeed --num_gpus=$(PROCESSES) -m dsframe.train --config zero3.json --run-dir runs/deepspeed
	@second=$$(launch/second-engine); case $$second in \
		horovod) run="horovodrun -np $(PROCESSES) python -m dsframe.train" ;; \
		*) run="torchrun --standalone --nproc-per-node=$(PROCESSES) -m dsframe.train --engine ddp" ;; \
	esac; \
	for command in "$$run --config zero3.json --run-dir runs/$$second" \
		"dsframe report runs/deepspeed runs/$$second -o runs/report.html" \
		"dsframe compare runs/deepspeed runs/$$second"; do \
		echo "$$command"; $$command; \
	done

test: lint ## lint, then a test of every promise, some at a time; `make test WORKERS=0` takes them one after another
	$(PYTEST) -m "not long"

test-all: lint ## lint, then every test, with the long matrices too: for the night
	$(PYTEST)

mpi: ## a second Horovod, with MPI, in .setup/horovod-mpi (some minutes, once per machine)
	@launch/setup mpi

launchers: setup ## the matrix: every engine under every launcher, two processes, the same losses (6 minutes)
	python -m tests.launchers

portability: setup ## the matrix: save under every engine, go on under every other (40 minutes)
	python -m tests.portability

kill-test: setup ## kills a random rank at a random moment, 100 times, and compares what comes out (half an hour)
	python -m tests.kill

attack: setup ## attacks trainings, disks, clocks, ports and files for half an hour: the table of docs/attacks.md
	python -m tests.attack

gpu-check: setup ## every engine and launcher on this machine's GPUs in short trainings: a table, a verdict, a file (10 minutes)
	dsframe doctor --train

versions: setup ## the Pythons and versions of torch that are declared: tests, trainings, the table of docs/support.md (15 minutes)
	python -m tests.versions

lint: setup ## format, style and types
	ruff format --check .
	ruff check .
	mypy

format: setup ## rewrites the sources as `make lint` wants them
	ruff format .
	ruff check --fix .

equivalence: setup ## every engine beside one process, losses and weights: the tables of docs/promise.md (more than an hour)
	python -m tests.equivalence
	python -m tests.features

footprint: setup ## what every engine holds and sends, beside theory: the tables of docs/measurements.md (10 minutes)
	python -m tests.footprint

bench: setup ## dsframe beside hand-written loops, Accelerate, Lightning and the HF Trainer, in turns: ratios, memory, losses
	python -m pip install -q --no-build-isolation -c constraints.txt -c .setup/torch.txt -e '.[bench]'
	python -m benchmarks.compare

bench-quick: setup ## bounds that hold on a busy machine too: the time of a check, what ranks ask and send by their number (2 minutes)
	python benchmarks/check_startup.py
	python -m benchmarks.many_ranks --ranks 2,16

predictions: setup ## what the plan says of memory and time beside what runs take: the table of docs/measurements.md (50 minutes)
	python -m tests.predictions

startup: setup ## from the command to the first step, warm and without compiled ops, beside scripts written by hand (10 minutes)
	python -m benchmarks.startup
	python -m benchmarks.startup --engines zero1,zero3 --cold

soak: setup ## 5,000 steps on four engines: memory, and the speed beside a run that has just begun (15 minutes)
	python -m benchmarks.soak

docs: setup ## rewrites the pages of docs/ that follow from the code, and the editors' schema
	python docs/generate.py

site: setup ## the documentation as a site, in build/site; to read it: python -m http.server -d build/site
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

clean: ## takes away everything that setup, tests and runs have made here, but not your runs
	rm -rf .venv .setup .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
