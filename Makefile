PYTHON ?= python3.11
BIN := .venv/bin
EXTRAS ?= dev

.PHONY: demo test coverage slow pythons lowest experiments mutants leakage gallery lint types house benchmark gpu docs fuzz wheel release clean

# Exact versions, each file by its hash; nothing is built from what is not in the lock.
LOCKED := install -q --require-hashes --no-deps -r

# One environment for all targets.
.venv/.installed: pyproject.toml lab/pyproject.toml requirements.lock requirements-extras.lock requirements-cuda.lock
	$(PYTHON) -m venv .venv || python3 -m venv .venv
	.ci/locked .venv
	$(if $(filter-out dev,$(EXTRAS)),$(BIN)/pip $(LOCKED) requirements-extras.lock)
	$(BIN)/pip install -q --no-deps --no-build-isolation -e . -e ./lab
	touch $@

# Six cities by a formula, between three institutions and a server, each a process, joined as they would be between machines;
# the answer beside NUTS; and meanwhile, in what time that leaves, what a server would learn of single children, with masks
# and without.
demo: .venv/.installed
	rm -rf runs/demo runs/demo-audit && mkdir -p runs/demo-audit
	nice $(BIN)/secure-fvi audit examples/six_cities.toml --attack individuals --worlds 12 --individuals 30 --rounds 3 \
		--out runs/demo-audit/found > runs/demo-audit/said.txt 2>&1 & audit=$$!; trap "kill $$audit 2> /dev/null" EXIT; \
	$(BIN)/secure-fvi poc --folder runs/demo && \
	$(BIN)/secure-fvi compare runs/demo/hub/run $(foreach site,north south east,--table $(site)=runs/demo/$(site)/$(site).csv) --draws 400; \
	done=$$?; wait $$audit; audited=$$?; cat runs/demo-audit/said.txt; exit $$((done + audited))

# Two workers on two cores: a second thread in either would wait for the other's. Bytecode is kept whatever the user's own
# setting, since each worker, and each process that a test starts, would compile the package and the tests anew.
test: .venv/.installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

# Mutated messages to every decoder and party, for as long as one likes.
SECONDS ?= 3600
fuzz: .venv/.installed
	FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest -s -m slow tests/deployment/test_fuzz.py

# The second tier: every test but those for CUDA, the documentation, and the wheel as strangers install it. Hours.
slow: .venv/.installed
	SENSITIVITY_ROUNDS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"
	$(MAKE) docs pythons lowest

# Lines and branches of the core that the first tier takes in its own processes; FLOOR is what they may not fall below, in
# percent. Measured: 94.2, of aggregation, privacy and deployment 97; with the lab, whose programs run for hours, 87.9.
FLOOR ?= 93
coverage: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" \
		--cov --cov-branch --cov-report=term:skip-covered
	$(BIN)/coverage report --omit='lab/*' --format=total --precision=1 --fail-under=$(FLOOR)

# The wheel, alone, with every Python that is found here, and with the oldest versions that are allowed.
pythons: wheel
	for p in python3.11 python3.12 python3.13; do \
		if $$p --version > /dev/null 2>&1; then .ci/install_wheel build/wheel/*.whl $$p || exit 1; else echo "$$p: not here, left out"; fi; done

lowest: wheel
	.ci/install_wheel build/wheel/*.whl $(PYTHON) lowest

# The third tier: the papers' experiments anew, into runs/experiments. Days on two cores; ONLY=name for one.
experiments: .venv/.installed
	set -e; for name in $(or $(ONLY),$$($(BIN)/python -c "from secure_fvi_lab.experiments import REPRODUCTIONS; print(*REPRODUCTIONS)")); do \
		$(BIN)/secure-fvi reproduce $$name --out runs/experiments/$$name; done

# Every refusal removed, one at a time: ONLY=aggregation, privacy, deployment or silo for one part. Minutes.
mutants: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(if $(ONLY),--only $(ONLY))

# 1,000 generated programs with exact posteriors, and all models of the gallery by default: hours on one core.
gallery: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m "slow or not slow" tests/posteriors

# 10,000 random behaviours of a lying server. Minutes.
leakage: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/aggregation/test_leakage_rank.py

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: .venv/.installed
	$(BIN)/mypy

# Size and order of the code: lines, what a silo's job imports, circles, times.
house: .venv/.installed
	$(BIN)/python .ci/house.py

benchmark: .venv/.installed
	$(BIN)/pip $(LOCKED) requirements-extras.lock
	mkdir -p benchmarks/out
	$(BIN)/secure-fvi bench step --json | tee benchmarks/out/step.json
	$(BIN)/secure-fvi bench accountants --json | tee benchmarks/out/accountants.json
	$(BIN)/secure-fvi bench ledger --json | tee benchmarks/out/ledger.json
	test -z "$$SECURE_FVI_DATA" || $(BIN)/secure-fvi bench local-step --json | tee benchmarks/out/local_step.json
	test -z "$$SECURE_FVI_DATA" || $(BIN)/secure-fvi bench privacy --json | tee benchmarks/out/privacy.json
	$(BIN)/secure-fvi bench secure-sum --json --plot benchmarks/out/secure_sum.png | tee benchmarks/out/secure_sum.json

# On a machine with a CUDA device, some 20 minutes: equality with the CPU first, then speed, in one JSON to commit. GPU_PYTHON
# is a Python that has PyTorch with CUDA and this package's other dependencies. DEVICE=cpu goes through the same commands in
# a minute or two without one, and shows nothing of CUDA.
GPU_PYTHON ?= $(BIN)/python
DEVICE ?= cuda
gpu: $(if $(filter cpu,$(DEVICE)),.venv/.installed)
	mkdir -p benchmarks/out
	PYTHONPATH=$(CURDIR):$(CURDIR)/lab $(GPU_PYTHON) -m pytest -m gpu
	PYTHONPATH=$(CURDIR):$(CURDIR)/lab $(GPU_PYTHON) -c "from secure_fvi_lab.bench.commands import bench; bench()" gpu --device $(DEVICE) \
		--out $(if $(filter cpu,$(DEVICE)),benchmarks/out/gpu-cpu.json --quick,benchmarks/gpu.json)

docs: .venv/.installed
	$(BIN)/pip $(LOCKED) requirements-extras.lock
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

# The same bytes wherever and whenever this commit is built: times are the commit's, modes are set.
wheel: .venv/.installed
	rm -rf build/wheel build/lib build/bdist.*
	umask 022 && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/pip wheel -q --no-deps --no-build-isolation -w build/wheel .

# The core's wheel, its hash, and what it stands on (with the extra for sites) as CycloneDX, from an environment that holds
# nothing else, lab/ neither: in dist/.
# VERSION has to be the tag of this commit. SIGNING_KEY: an Ed25519 key of `ssh-keygen`; SECURITY.md says how to verify.
SIGNING_KEY ?=
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' secure_fvi/__init__.py)
release: wheel
	test "$$(git describe --exact-match --tags 2> /dev/null)" = v$(VERSION) || { echo "this commit is not tagged v$(VERSION)"; exit 1; }
	test -z "$$(git status --porcelain)" || { echo "the working tree is not what is tagged"; exit 1; }
	rm -rf dist build/release && mkdir dist && cp build/wheel/*.whl dist/
	$(PYTHON) -m venv build/release/site && $(PYTHON) -m venv build/release/tool
	.ci/locked build/release/site
	build/release/site/bin/pip install -q --no-deps dist/*.whl
	build/release/site/bin/pip uninstall -q -y $$(build/release/site/bin/python .ci/unneeded.py 'secure-fvi[distributed]')
	cd build/release && site/bin/secure-fvi --version && ! site/bin/secure-fvi bench && site/bin/python -c 'import secure_fvi.deployment.serving'
	build/release/tool/bin/pip install -q cyclonedx-bom==7.5.0
	build/release/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		-o dist/secure-fvi.cdx.json build/release/site
	cd dist && sha256sum * > SHA256SUMS
	$(if $(SIGNING_KEY),cd dist && ssh-keygen -q -Y sign -n secure-fvi-release -f $(abspath $(SIGNING_KEY)) SHA256SUMS,@echo "dist/ is NOT signed: give SIGNING_KEY")

clean:
	rm -rf .venv runs site build dist *.egg-info lab/*.egg-info
