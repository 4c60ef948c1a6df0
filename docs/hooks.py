"""MkDocs hooks that add pages for results and the notebook, and render equations as MathML.

They need no network and write nothing outside the site.
"""

import base64
import html
import re
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
RESULTS_LINK = re.compile(r"\]\((?:\.\./)+experiments/results/?([^)]*)\)")
EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the results pages to the navigation."""
    section = next(entry for entry in config.nav if "Results" in entry)
    pages = [{name_of(path): page_of(path)} for path in result_texts()]
    section["Results"] = [{"Overview": "results/index.md"}, *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and images from outside docs/pages."""
    for path in result_texts():
        files.append(File.generated(config, page_of(path), content=path.read_text()))
        for image in path.parent.glob("*.png"):
            uri = f"results/{path.parent.name}/{image.name}"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(image)))
    listed = "\n".join(
        f"- [{title_of(path)}]({page_of(path).removeprefix('results/')})" for path in result_texts()
    )
    files.append(File.generated(config, "results/index.md", content=f"{OVERVIEW}\n{listed}\n"))
    demo = str(RESULTS / "demo.png")
    files.append(File.generated(config, "results/demo.png", abs_src_path=demo))
    text, images = notebook_page(nbformat.read(NOTEBOOK, as_version=4))
    files.append(File.generated(config, "tutorials/notebook.md", content=text))
    for name, content in images.items():
        files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Rewrites links to results folders, which work in the repository, as links to their pages."""
    up = "../" * page.file.src_uri.count("/")

    def link(match: re.Match) -> str:
        return f"]({up}results/{(match[1] or 'README.md').replace('README', 'index')})"

    return RESULTS_LINK.sub(link, markdown)


def on_page_content(content: str, **_) -> str:
    """Replaces LaTeX with MathML, which browsers render without JavaScript."""
    return EQUATION.sub(_mathml, content)


OVERVIEW = """# Results

Each page shows the committed results of one table, `experiments/results/TABLE`: the paper's numbers
beside ours, the figure, and notes. `python scripts/table.py TABLE` prints the same table. The last
pages are benchmarks of speed.
"""


def result_texts() -> list[Path]:
    """Returns the Markdown files of all results folders, tables first."""
    tables = sorted(RESULTS.glob("*/README.md"))
    others = (path for path in RESULTS.glob("*/*.md") if path.name not in ("README.md", "notes.md"))
    return tables + sorted(others)


def page_of(path: Path) -> str:
    return f"results/{path.parent.name}/{path.name.replace('README', 'index')}"


def name_of(path: Path) -> str:
    """Returns a short name for the navigation, as table titles are long."""
    return path.parent.name if path.name == "README.md" else f"{path.parent.name}: {path.stem}"


def title_of(path: Path) -> str:
    return path.read_text().split("\n", 1)[0].removeprefix("# ")


def notebook_page(notebook: nbformat.NotebookNode) -> tuple[str, dict[str, bytes]]:
    """Converts a notebook to Markdown; also returns its images by file name."""
    parts, images = [], {}
    for cell in notebook.cells:
        parts.append(cell.source if cell.cell_type == "markdown" else _fenced(cell.source))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"notebook_{len(images)}.png"
                images[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Figure {len(images)} of the notebook]({name})")
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(_fenced(text, "text"))
    return "\n\n".join(parts) + "\n", images


def _fenced(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _mathml(match: re.Match) -> str:
    display = "block" if match["tag"] == "div" else "inline"
    mathml = convert(html.unescape(match["latex"]).strip(), display=display)
    return f'<div class="equation">{mathml}</div>' if display == "block" else mathml
