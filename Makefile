# make demo          effective degree at work on real pictures, in three minutes on two CPU cores
# make test          all checks: lint, format, tests
# make test-smoke    the quick part of the tests, in two minutes
# make test-faults   kills, full disks, damaged and hostile files at random; 10 minutes on two cores
# make test-slurm    the launcher and sweeps on a real SLURM, which it installs and starts; 3 minutes
# make test-browser  the report page in a real browser, which it installs
# make test-lowest   the tests with the oldest packages that pyproject.toml allows, in .venv-lowest
# make benchmark     how fast this machine trains and measures
# make report        every table, run and figure of the committed results: report/index.html
# All set up what they need in .venv, and print what they will do first (make -n TARGET: print only).
# A .venv that you made yourself, or a link to one, is used as it is.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-smoke test-faults test-slurm test-browser test-lowest benchmark report format clean

demo: .venv/ready
	$(BIN)/python scripts/demo.py

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n auto --dist worksteal

test-smoke: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto --dist worksteal -m smoke

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
	.venv-lowest/bin/python -m pytest -n auto --dist worksteal

benchmark: .venv/ready
	$(BIN)/python scripts/benchmark.py

report: .venv/ready
	$(BIN)/python scripts/report.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/ready: requirements.txt requirements-procgen.txt pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" bash scripts/setup.sh

clean:
	rm -rf .venv .venv-lowest demo .pytest_cache .ruff_cache .hypothesis
