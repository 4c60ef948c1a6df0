"""Tests that the README is short, its links and numbers are right, and its code runs."""

import errno
import os
import re
from unittest.mock import Mock

import pytest

from ed.analysis import verdicts  # before tests change APP, which it reads on import
from ed.analysis.verdicts import Headline, Verdict
from ed.runtime import files
from tests.helpers.blocks import blocks_of, check_command, commands_of
from tests.helpers.commands import ROOT, run_command

README = ROOT / "README.md"
TEXT = README.read_text()
BLOCKS = blocks_of(README)
PAGES = sorted((ROOT / "docs" / "pages").rglob("*.md"))
# test_docs.py runs the commands of pages that create files
SOURCES = [README, ROOT / "CONTRIBUTING.md"]
SOURCES += [*(page for page in PAGES if not any(b.title for b in blocks_of(page)))]
LINES = [line for source in SOURCES for line in commands_of(source)]
COMMANDS = {re.sub(r"^srun .*?(?=\.venv/)", "", line): line for line in LINES}.values()


def test_the_first_block_has_the_two_make_commands():
    assert list(commands_of(README))[:2] == ["make demo", "make test"]
    assert BLOCKS[0].language == "bash"


def test_the_library_example_runs(tmp_path):
    (code,) = [block.text for block in BLOCKS if block.language == "python"]
    (tmp_path / "example.py").write_text(code)
    run = run_command([str(tmp_path / "example.py")])
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert run.stdout.strip() in code  # the comment shows the printed estimate


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path):
    check_command(command, tmp_path)


def test_relative_links_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_the_readme_is_short():
    words = [word for word in TEXT.split() if re.search(r"\w", word)]  # no bars of tables
    assert len(words) <= 700
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    for paragraph in prose.split("\n\n"):
        lines = paragraph.strip().splitlines()
        is_table = any(line.startswith("|") for line in lines)
        assert is_table or len(lines) <= 3, paragraph


def test_the_readme_says_when_runs_resume_bit_for_bit():
    (paragraph,) = [part for part in TEXT.split("\n\n") if "bit for bit" in part]
    assert "(`system.threads`)" in paragraph


def test_words_to_avoid_are_found(tmp_path):
    clean = [str(page.relative_to(ROOT)) for page in (README, *PAGES)]
    run = run_command(["scripts/check_words.py", *clean])
    assert run.returncode == 0, run.stdout
    (tmp_path / "notes.md").write_text("fine\nA picture is told.\n")
    run = run_command(["scripts/check_words.py", str(tmp_path / "notes.md")])
    assert run.returncode == 1
    assert run.stdout.count("notes.md:2: ") == 2


def test_the_headline_table_is_up_to_date():
    run = run_command(["scripts/readme.py", "--check"])
    assert run.returncode == 0, run.stderr


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A README whose headline table is out of date; scripts/readme.py runs in a fork."""
    row = Headline("a claim", "1", "2", Verdict.DIRECTION, "launch.py a", None, "a")
    monkeypatch.setattr(verdicts, "headline", lambda: [row])  # the real one takes seconds
    monkeypatch.setattr(files, "APP", tmp_path)
    path = tmp_path / "README.md"
    path.write_text(
        "# ED\n\n<!-- headline: python scripts/readme.py -->\n<!-- end of headline -->\n"
    )
    return path


def test_the_headline_table_is_written_whole_or_not_at_all(copy, monkeypatch):
    before = copy.read_text()
    with monkeypatch.context() as full:
        full.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "disk full")))
        assert run_command(["scripts/readme.py"]).returncode == 1
    assert copy.read_text() == before
    assert run_command(["scripts/readme.py"]).returncode == 0
    assert "| Claim |" in copy.read_text()


def test_a_readme_without_markers_is_a_one_line_error(copy):
    copy.write_text("no table\n")
    run = run_command(["scripts/readme.py"])
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "markers" in run.stderr
