# Everything works on a fresh clone: each target makes its virtual environment first and re-uses it
# until pyproject.toml changes. `make PYTHON=/path/to/python3 demo` builds on another Python.

PYTHON ?= python3
# Another torch has an environment of its own: `make test TORCH=2.15.0`.
ifdef TORCH
VENV ?= .venv-torch$(TORCH)
export CODA_CPU_TORCH := torch==$(TORCH)
endif
VENV ?= .venv
OUT ?= benchmarks/results/latest.json
# Tests side by side, and threads of torch's in each.
JOBS ?= 2
THREADS ?= 1
# Random programs of `make fuzz`, and the first one's seed.
N ?= 300
SEED ?= 0
# What users write, a pattern file, a program that a compiler got wrong, reports.
SMOKE := tests/test_smoke.py tests/cli/test_check.py::test_good_file_passes_every_check \
	"tests/test_public_faults.py::test_it_is_no_fault_here[coda-a_document_does_not_read_the_one_before hf 41827]" \
	tests/test_warm.py tests/test_report.py
RUN := $(VENV)/bin/python
SETUP := $(PYTHON) tools/setup_env.py $(VENV)
PACKAGING := pyproject.toml setup.py tools/setup_env.py

.PHONY: help smoke demo test fuzz bench lint docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16

smoke: $(VENV)/.test  ## does it work here? a Llama against eager and a few other tests, a minute
	OMP_NUM_THREADS=$(THREADS) $(RUN) -m pytest -n $(JOBS) $(SMOKE) $(ARGS)

demo: $(VENV)/.demo  ## compile a Llama and show what was fused, the error and (on a GPU) the speed
	$(RUN) examples/demo.py

# Where nobody keeps bytecode, each of the processes would compile torch's files.
test: $(VENV)/.test  ## run the tests (ARGS="-k name" narrows, JOBS=8 widens, TORCH=2.15.0 on that)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(THREADS) $(RUN) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

fuzz: $(VENV)/.test  ## hunt with N random programs from SEED on; each failure prints a script
	FUZZ="$(SEED) $(N)" OMP_NUM_THREADS=$(THREADS) $(RUN) -m pytest -n $(JOBS) \
		--timeout 600 --timeout-method thread tests/fuzz/test_fuzz.py $(ARGS)

bench: $(VENV)/.bench  ## stock models under torch.compile and coda, into OUT (needs a GPU)
	$(RUN) -m benchmarks headline $(OUT) $(ARGS)

lint: $(VENV)/.dev  ## ruff, format, types, import direction, house limits
	$(RUN) tools/lint.py

docs: $(VENV)/.docs  ## build the site of docs/ into site/
	$(RUN) -m mkdocs build --strict $(ARGS)

clean:  ## remove the virtual environment, caches and debug output
	rm -rf $(VENV) .venv-torch* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf coda_debug
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# One stamp a goal, so that `make demo` does not wait for what only the tests need.
$(VENV)/.demo $(VENV)/.test $(VENV)/.bench $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: $(PACKAGING)
	$(SETUP) $*
	@touch $@
