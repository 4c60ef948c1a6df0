"""Tests that the documentation site builds without warnings and that its code blocks run."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ed
from tests.helpers.blocks import blocks_of, commands_of, run_small
from tests.helpers.commands import ROOT, run_command
from tests.package.test_readme import PAGES

NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
NEEDED = {"huggingface": "accelerate", "lightning": "lightning"}
LANGUAGES = {"bash", "python", "yaml", "text"}


def code_of(page: Path) -> str:
    """Joins a page's Python blocks into one program, without those to be saved as files."""
    found = [b.text for b in blocks_of(page) if b.language == "python" and not b.title]
    return "\n".join(found)


@pytest.mark.parametrize("page", [*filter(code_of, PAGES)], ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path):
    if page.stem in NEEDED:
        pytest.importorskip(NEEDED[page.stem])
    script = tmp_path / "page.py"
    script.write_text(code_of(page))
    run = run_command([str(script)], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr


def test_every_block_has_a_known_language():
    for page in PAGES:
        assert {block.language for block in blocks_of(page)} <= LANGUAGES, page


def test_the_parts_of_the_extension_page_work_together(tmp_path):
    """Runs the page's commands in a folder that mimics a clone and contains the page's files."""
    page = ROOT / "docs" / "pages" / "extend.md"
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("train.py", "scripts", "configs", "experiments", "ed"):
        (clone / name).symlink_to(ROOT / name)
    for block in blocks_of(page):
        if block.title:
            assert len(list(filter(None, block.text.splitlines()))) < 30, block.title
            (clone / block.title).parent.mkdir(parents=True, exist_ok=True)
            (clone / block.title).write_text(block.text.replace("/path/to", str(clone)))
    export, *commands = commands_of(page)
    assert export == "export PYTHONPATH=$PWD"
    for command in commands:
        run = run_small(command, tmp_path / "runs", cwd=clone, env={"PYTHONPATH": str(clone)})
        assert run.returncode == 0, run.stderr
        assert "has no effect" not in run.stderr, run.stderr  # e.g. of a sampler
    assert "Plain" in run.stdout  # a row of the table
    assert parts_in((tmp_path / "runs").rglob("config.yaml")) == parts_in(clone.rglob("mine/*/*/*"))


def parts_in(configs: Iterable[Path]) -> set[str]:
    """Returns the classes of the extension page that these configs name."""
    return {name for path in configs for name in re.findall(r"\bmine\.\w+\.\w+", path.read_text())}


class Links(HTMLParser):
    """Collects the links, loaded files and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.targets: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.targets.append((tag, value))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


def test_pages_load_only_local_files_and_have_no_broken_links(site):
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    for path, links in pages.items():
        if path.name == "404.html":  # its links are relative to the site's root
            continue
        for tag, target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                assert tag == "a", f"{path} loads {target}"
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert there.exists(), f"{path}: {target}"
            if parts.fragment and there in pages:
                assert parts.fragment in pages[there].anchors, f"{path}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_work_in_the_repository_too(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_equations_and_results_are_on_the_site(site):
    assert "<math" in (site / "method.html").read_text()
    assert not re.search(r'class="arithmatex"', (site / "method.html").read_text())
    for folder in (ROOT / "experiments" / "results").glob("*/README.md"):
        assert (site / "results" / folder.parent.name / "index.html").exists()
    for figure in (ROOT / "experiments" / "results").glob("*/figure.png"):
        assert (site / "results" / figure.parent.name / "figure.png").exists()


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ed.__version__ == project["version"]
    assert f"## [{ed.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    ruff = re.search(r"^ruff==(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    assert f"rev: v{ruff}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_the_notebook_runs_and_its_figures_are_committed():
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    traitlets = pytest.importorskip("traitlets.config")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert count_figures(notebook) == 2
    for cell in notebook.cells:
        cell.source = cell.source.replace("epochs=20", "epochs=1").replace("size=64", "size=8")
    how = {"timeout": 300, "startup_timeout": 300, "resources": {"metadata": {"path": ROOT}}}
    # sockets in files, because another process could take a free TCP port before the kernel does
    how["config"] = traitlets.Config({"KernelManager": {"transport": "ipc"}})
    client.NotebookClient(notebook, **how).execute()
    assert count_figures(notebook) == 2


def count_figures(notebook) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)
