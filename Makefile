PYTHON ?= python3.11
BIN := .venv/bin
EXTRAS ?= dev

.PHONY: demo test slow lint types benchmark docs clean

# One environment for all targets. Torch comes first, at its pinned version, so that no dependency pulls another build.
.venv/.installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv || python3 -m venv .venv
	$(BIN)/pip install -q -c requirements.lock torch
	$(BIN)/pip install -q -c requirements.lock -e '.[$(EXTRAS)]'
	touch $@

demo: .venv/.installed
	rm -rf runs/demo
	$(BIN)/secure-fvi run examples/six_cities.toml --out runs/demo
	$(BIN)/secure-fvi compare runs/demo

# Two workers on two cores: a second thread in either would wait for the other's.
test: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

slow: .venv/.installed
	$(BIN)/python -m pytest -m slow

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

benchmark: .venv/.installed
	$(BIN)/pip install -q -c requirements.lock -e '.[benchmark]'
	mkdir -p benchmarks/out
	$(BIN)/secure-fvi bench step --json | tee benchmarks/out/step.json
	$(BIN)/secure-fvi bench accountants --json | tee benchmarks/out/accountants.json
	$(BIN)/secure-fvi bench ledger --json | tee benchmarks/out/ledger.json
	test -z "$$SECURE_FVI_DATA" || $(BIN)/secure-fvi bench local-step --json | tee benchmarks/out/local_step.json
	test -z "$$SECURE_FVI_DATA" || $(BIN)/secure-fvi bench privacy --json | tee benchmarks/out/privacy.json
	$(BIN)/secure-fvi bench secure-sum --json --plot benchmarks/out/secure_sum.png | tee benchmarks/out/secure_sum.json

docs: .venv/.installed
	$(BIN)/pip install -q -c requirements.lock -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

clean:
	rm -rf .venv runs site build dist *.egg-info
