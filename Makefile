# make book            build everything, run every notebook, make the pages (QUICK=0: the full grids)
# make test            the same set-up, then every test, in two processes (WORKERS=0: in one)
# make exercises       every page with exercises as a notebook without the answers, into _build/exercises
# make links           ask every site that the book links to
# Notebook parameters: make book QUICK=0 RANKS=8 DEVICE=cuda LINK=10gbit (RANKS=auto: one a GPU)

PYTHON ?= python3
QUICK  ?= 1
BIN    := .venv/bin
STAMP  := .venv/.installed
# one cell may take 10 minutes in the quick edition, an hour with the full grids
LIMIT  := $(if $(filter 0,$(QUICK)),3600,600)
# tests of the quick edition run side by side; the measurements of the full one have the machine to themselves
WORKERS ?= $(if $(filter 0,$(QUICK)),0,2)
ours   := PYTHON QUICK RANKS DEVICE LINK WORKERS LIMIT ARGS
wrong  := $(foreach name,$(.VARIABLES),$(if $(filter command%,$(origin $(name))),$(filter-out $(ours),$(name))))
$(if $(strip $(wrong)),$(error unknown: $(strip $(wrong)); the names here are $(ours)))
NAMES  := $(foreach name,QUICK RANKS DEVICE LINK,$(if $($(name)),$(name)))

# where it is set, every process of the book and the tests compiles all of the package again
unexport PYTHONDONTWRITEBYTECODE
# glibc: large pages for large tensors. To touch new memory in small ones takes longer than to compute with it
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.DELETE_ON_ERROR:
.PHONY: book test exercises lint links clean

book: $(STAMP)
	$(BIN)/python -m ddplab.notebooks . --build --timeout $(LIMIT) $(foreach name,$(NAMES),-p $(name) $($(name)))

test: $(STAMP) .venv/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) $(foreach name,$(NAMES),--given $(name)=$($(name))) $(ARGS)

exercises: $(STAMP)
	$(BIN)/python -m ddplab.exercises .

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

links: $(STAMP)
	$(BIN)/python -m ddplab.linkcheck .

clean:
	rm -rf _build

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("ddplab needs Python 3.11 or newer, and this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

# pip shows its own progress; nothing is installed again while the requirements stay the same
$(STAMP): requirements.txt pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -r requirements.txt -e .
	@touch $@

.venv/.installed-dev: requirements-dev.txt $(STAMP)
	$(BIN)/python -m pip install -r requirements-dev.txt
	@touch $@
