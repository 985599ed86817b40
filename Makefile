# make prove: the main job. make test: the test suite. Both set up .venv when there is none.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: prove test prove-deep clean

prove: .venv/ready
	$(BIN)/refengine prove

test: .venv/ready
	$(BIN)/python -m pytest -m "not peers and not real and not platforms and not browser and not notebooks"

# As long as you give it: make prove-deep EXAMPLES=100000
EXAMPLES ?= 2000
prove-deep: .venv/ready
	HYPOTHESIS_PROFILE=deep EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -m "not platforms" proofs

.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf .venv .hypothesis .pytest_cache build dist
