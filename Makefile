# make demo          train with and without ED on real images; three minutes on two CPU cores
# make test          all checks: lint, format, tests
# make test-smoke    the quick tests; two minutes
# make test-faults   random kills, full disks, damaged and hostile files; 10 minutes on two cores
# make test-slurm    the launcher and sweeps on SLURM, which it installs and starts; 3 minutes
# make test-browser  the report page in a browser, which it installs
# make test-lowest   the tests with the oldest packages that pyproject.toml allows, in .venv-lowest
# make lint          ruff, and words that CONTRIBUTING.md asks to avoid
# make docs          the documentation site, offline, in docs/site; half a minute
# make benchmark     times training and measuring on this machine
# make report        every table, run and figure of the committed results: report/index.html
# Targets install what they need into .venv (make -n TARGET prints the commands). An existing .venv
# of your own, or a link to one, is used unchanged.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-smoke test-faults test-slurm test-browser test-lowest lint docs benchmark report format clean

demo: .venv/ready
	@echo "demo: trains and draws small networks; 3 minutes on two CPU cores"
	$(BIN)/python scripts/demo.py

test: lint
	@echo "test: lint, format, all tests on every core; test-smoke is the quick part"
	$(BIN)/python -m pytest -n auto --dist worksteal

test-smoke: .venv/ready
	@echo "test-smoke: lint and the quick tests; 2 minutes on two cores"
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto --dist worksteal -m smoke

test-faults: .venv/ready
	@echo "test-faults: kills, full disks and damaged files at random; 10 minutes on two cores"
	ED_FAULTS=full $(BIN)/python -m pytest tests/faults

test-slurm: .venv/ready
	@echo "test-slurm: the launcher on a real SLURM, started here; 3 minutes"
	bash scripts/install_slurm.sh
	$(BIN)/python -m pytest -m slurm tests/scripts/test_slurm.py

test-browser: .venv/ready
	@echo "test-browser: the report page in chromium"
	bash scripts/setup_browser.sh
	$(BIN)/python -m pytest tests/analysis/test_report.py -m browser

test-lowest:
	@echo "test-lowest: installs the oldest packages allowed into .venv-lowest (several GB), then tests"
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python \
		--resolution lowest-direct --editable '.[train,tables,clip,glue,slurm,dev]'
	.venv-lowest/bin/python -m pytest -n auto --dist worksteal

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_words.py

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

benchmark: .venv/ready
	@echo "benchmark: how fast this machine trains and measures; 2 minutes on a CPU"
	$(BIN)/python scripts/benchmark.py

report: .venv/ready
	@echo "report: writes report/index.html"
	$(BIN)/python scripts/report.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: requirements.txt requirements-docs.txt requirements-procgen.txt pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" bash scripts/setup.sh

clean:
	rm -rf .venv .venv-lowest demo docs/site .pytest_cache .ruff_cache .hypothesis
