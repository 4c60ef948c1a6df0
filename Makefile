# make demo          train with and without ED on real images; 3 minutes on two CPU cores
# make test          run all checks: lint, format, tests
# make test-smoke    run only the quick tests; 2 minutes
# make test-faults   test random kills, full disks and damaged files; 10 minutes on two cores
# make test-slurm    install and start SLURM, then test the launcher and sweeps on it; 3 minutes
# make test-browser  install a browser and test the report page in it
# make test-lowest   test with the oldest packages that pyproject.toml allows, in .venv-lowest
# make lint          run ruff and check for words that CONTRIBUTING.md asks to avoid
# make docs          build the documentation site in docs/site, without network; half a minute
# make benchmark     time training and measuring on this machine
# make report        write report/index.html with every committed table, run and figure
# Targets install what they need into .venv (make -n TARGET prints the commands). If you already
# have a .venv, or a link to one, it is used unchanged.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-smoke test-faults test-slurm test-browser test-lowest lint docs benchmark report format clean

demo: .venv/ready
	@echo "demo: train and plot small networks; 3 minutes on two CPU cores"
	$(BIN)/python scripts/demo.py

test: lint
	@echo "test: lint, format and all tests; 8 to 12 minutes on two cores (test-smoke: 2)"
	$(BIN)/python -m pytest -n auto --dist worksteal

test-smoke: .venv/ready
	@echo "test-smoke: lint and the quick tests; 2 minutes on two cores"
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto --dist worksteal -m smoke

test-faults: .venv/ready
	@echo "test-faults: random kills, full disks and damaged files; 10 minutes on two cores"
	ED_FAULTS=full $(BIN)/python -m pytest tests/faults

test-slurm: .venv/ready
	@echo "test-slurm: start SLURM on this machine and test the launcher; 3 minutes"
	bash scripts/install_slurm.sh
	$(BIN)/python -m pytest -m slurm tests/scripts/test_slurm.py

test-browser: .venv/ready
	@echo "test-browser: install Chromium if it is missing, and test the report page in it; 1 minute"
	bash scripts/setup_browser.sh
	$(BIN)/python -m pytest tests/analysis -m browser

test-lowest:
	@echo "test-lowest: install the oldest allowed packages into .venv-lowest (several GB), then test"
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
	@echo "benchmark: time training and measuring; 2 minutes on a CPU"
	$(BIN)/python scripts/benchmark.py
	$(BIN)/python scripts/benchmark.py --estimator

report: .venv/ready
	@echo "report: write report/index.html; 10 seconds"
	$(BIN)/python scripts/report.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: requirements.txt requirements-docs.txt requirements-procgen.txt pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" bash scripts/setup.sh

clean:
	rm -rf .venv .venv-lowest build demo docs/site .pytest_cache .ruff_cache .hypothesis
