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
	$(BIN)/python scripts/demo.py

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n auto

test-smoke: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto -m smoke

test-faults: .venv/ready
	ED_FAULTS=full $(BIN)/python -m pytest tests/faults

test-slurm: .venv/ready
	bash scripts/install_slurm.sh
	$(BIN)/python -m pytest -m slurm tests/scripts/test_slurm.py

test-browser: .venv/ready
	bash scripts/setup_browser.sh
	$(BIN)/python -m pytest tests/analysis/test_report.py -m browser

test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python \
		--resolution lowest-direct --editable '.[train,tables,clip,glue,slurm,dev]'
	.venv-lowest/bin/python -m pytest -n auto

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_words.py

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

benchmark: .venv/ready
	$(BIN)/python scripts/benchmark.py

report: .venv/ready
	$(BIN)/python scripts/report.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: requirements.txt requirements-docs.txt requirements-procgen.txt pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" bash scripts/setup.sh

clean:
	rm -rf .venv .venv-lowest demo docs/site .pytest_cache .ruff_cache .hypothesis
