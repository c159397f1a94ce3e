# Every target makes what it needs (a virtual environment with the exact versions of the lock file)
# and is the only command to type. `make help` lists them.
#
#   make test PYTHON=/path/to/python3.11     another interpreter (3.11 or newer, with venv)
#   make test PYTEST_ARGS='-k mla -x'        arguments for pytest
#   make demo DEMO_ARGS='--config.steps=50'  arguments for the run
#   make test JOBS=1                         one pytest process instead of up to four

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test test-hf test-tpu test-slow test-newest lint format bench bench-kernels aot scaling lock clean

# The first interpreter on the path that is new enough and can make a virtual environment.
USABLE = -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p $(USABLE) && { echo $$p; break; }; done)
endif
ifndef PYTHON312
PYTHON312 := $(shell for p in python3.12 "$$HOME"/.pyenv/versions/3.12*/bin/python; do \
	"$$p" $(USABLE) && { echo "$$p"; break; }; done)
endif

JOBS ?= auto
WORKDIR ?= runs/demo
PYTEST := -m pytest -n $(JOBS) --maxprocesses=4 --dist=loadfile $(PYTEST_ARGS)

# A stamp is named by a checksum of what it installed and with which interpreter: whenever either
# changes, the environment is made anew; otherwise nothing is done.
key = $(shell { cat $(1); echo '$(PYTHON)'; } | cksum | cut -d' ' -f1)
STAMP := .venv/installed-$(call key,requirements.lock)
STAMP_HF := .venv-hf/installed-$(call key,requirements.lock requirements-hf.lock)
STAMP_TPU := .venv-tpu/installed-$(call key,requirements.lock requirements-tpu.lock)

help:
	@echo 'make demo         train a small GLM-5 on the Python standard library: minutes, ends with a report'
	@echo 'make test         all quick tests; needs no torch'
	@echo 'make test-hf      comparisons with Hugging Face transformers (adds torch, CPU)'
	@echo 'make test-tpu     compiles for real TPU chips (adds the TPU compiler; needs no TPU)'
	@echo 'make test-slow    the slow tests, some of which compare with torch'
	@echo 'make test-newest  make test on Python 3.12 with the newest release of every dependency'
	@echo 'make lint         ruff (lint, format) and mypy'
	@echo 'make format       let ruff rewrite what it can'
	@echo 'make bench        side-by-side speed of this code and transformers'
	@echo 'make bench-kernels  cycles of the Pallas kernels on three TPU chips, from the compiler'
	@echo 'make aot          the 744B configs compiled for pods that are not here: memory, FLOPs, traffic'
	@echo 'make scaling      how cost grows: with the model, with chips, with the length of a row'
	@echo 'make lock         resolve requirements-*.txt anew and write the lock files'
	@echo 'make clean        remove environments and caches, keep runs/'

demo: $(STAMP)
	@echo '[demo] training the nano GLM-5 on the Python standard library; results in $(WORKDIR)'
	.venv/bin/python -m experiments.run --config=configs/nano_pretrain.py --workdir=$(WORKDIR) $(DEMO_ARGS)

test: $(STAMP)
	@echo '[test] the quick tests, on CPU'
	.venv/bin/python $(PYTEST) -m 'not hf and not tpu and not slow' tests

test-hf: $(STAMP_HF)
	@echo '[test-hf] comparisons with transformers, on CPU'
	.venv-hf/bin/python $(PYTEST) -m 'hf and not slow' tests

test-tpu: $(STAMP_TPU)
	@echo '[test-tpu] compiling for TPU chips ahead of time, on CPU'
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 .venv-tpu/bin/python $(PYTEST) -m 'tpu and not slow' tests

test-slow: $(STAMP_HF)
	@echo '[test-slow] the slow tests, on CPU'
	.venv-hf/bin/python $(PYTEST) -m slow tests

test-newest:
	@[ -n '$(PYTHON312)' ] || { echo 'make: no Python 3.12 found; name one: make test-newest PYTHON312=/path/to/python3.12' >&2; exit 1; }
	@echo '[setup] .venv-newest: $(PYTHON312) and the newest release of every dependency'
	@[ -x .venv-newest/bin/python ] || $(PYTHON312) -m venv .venv-newest
	@.venv-newest/bin/python -m pip install -q --upgrade --upgrade-strategy=eager -r requirements-dev.txt
	@.venv-newest/bin/python -c 'import sys, jax; print("[test-newest] Python", sys.version.split()[0], "with jax", jax.__version__)'
	.venv-newest/bin/python $(PYTEST) -m 'not hf and not tpu and not slow' tests

lint: $(STAMP)
	@echo '[lint] ruff and mypy'
	@status=0; \
	for check in 'ruff check .' 'ruff format --check .' mypy; do .venv/bin/$$check || status=1; done; \
	exit $$status

format: $(STAMP)
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: $(STAMP_HF)
	@echo '[bench] this code and transformers side by side, same weights and tokens, on CPU'
	.venv-hf/bin/python -m benchmarks.hf_cpu $(BENCH_ARGS)

bench-kernels: $(STAMP_TPU)
	@echo '[bench-kernels] compiling for v5p, v6e and tpu7x; tens of minutes on two cores'
	for chip in v5p:2x2x1 v6e:2x2 tpu7x:2x2x1; do \
	  .venv-tpu/bin/python -m pallas_kernels.bench --topology=$$chip $(BENCH_ARGS) || exit 1; done

aot: $(STAMP_TPU)
	@echo '[aot] every 744B compile of benchmarks/aot_table.py that has no result in runs/aot yet'
	.venv-tpu/bin/python -m benchmarks.aot_table $(AOT_ARGS)

scaling: $(STAMP_TPU)
	@echo '[scaling] every compile of benchmarks/scaling that has no result in runs/scaling yet, and its figures'
	.venv-tpu/bin/python -m benchmarks.scaling $(SCALING_ARGS)

# One recipe for all environments; $(1) the directory, $(2) the requirement flags.
define install
	@"$(PYTHON)" $(USABLE) || { echo "make: needs Python 3.11 or newer with the venv module (on Debian: apt install python3-venv), and PYTHON='$(PYTHON)' is none; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo '[setup] $(1): installing the locked versions with $(PYTHON), once; a few minutes'
	@"$(PYTHON)" -m venv --clear $(1)
	@$(1)/bin/python -m pip install -q $(2)
	@touch $@
endef

$(STAMP):
	$(call install,.venv,-r requirements.lock)

$(STAMP_HF):
	$(call install,.venv-hf,-r requirements.lock -r requirements-hf.lock)

$(STAMP_TPU):
	$(call install,.venv-tpu,-r requirements.lock -r requirements-tpu.lock)

# uvloop is the one package here that exists on some platforms only.
FREEZE = -m pip freeze --exclude-editable | sed 's/^\(uvloop==.*\)/\1; sys_platform != "win32"/'
lock:
	@echo '[lock] resolving in clean environments'
	@"$(PYTHON)" -m venv --clear .venv-lock
	@.venv-lock/bin/python -m pip install -q -r requirements-dev.txt
	@{ sed -n '/^#/p' requirements.lock; .venv-lock/bin/python $(FREEZE); } > .venv-lock/core.lock
	@.venv-lock/bin/python -m pip install -q -r .venv-lock/core.lock -r requirements-hf.txt
	@{ sed -n '/^#/p' requirements-hf.lock; .venv-lock/bin/python $(FREEZE) | sed 's/+cpu$$//' | grep -vxFf .venv-lock/core.lock; } > .venv-lock/hf.lock
	@"$(PYTHON)" -m venv --clear .venv-lock-tpu
	@.venv-lock-tpu/bin/python -m pip install -q -r .venv-lock/core.lock -r requirements-tpu.txt
	@{ sed -n '/^#/p' requirements-tpu.lock; .venv-lock-tpu/bin/python $(FREEZE) | grep -vxFf .venv-lock/core.lock; } > .venv-lock/tpu.lock
	@mv .venv-lock/tpu.lock requirements-tpu.lock
	@mv .venv-lock/core.lock requirements.lock && mv .venv-lock/hf.lock requirements-hf.lock
	@rm -rf .venv-lock .venv-lock-tpu

clean:
	rm -rf .venv .venv-hf .venv-tpu .venv-newest .venv-lock .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
