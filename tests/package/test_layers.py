"""Tests that layers import only lower layers and that heavy packages are imported lazily."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ed

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "core": ("kernels",),
    "runtime": (),
    "kernels": (),
    "datasets": ("core.validate", "runtime"),
    "models": ("core", "kernels", "runtime"),
    "regularizers": ("core", "runtime"),
    "measures": ("core", "runtime"),
    "figures": ("core", "runtime", "analysis"),
    "envs": ("core.validate",),
    "tasks": ("core", "runtime", "datasets", "models", "envs"),
    "engine": (
        "core",
        "runtime",
        "models.weights",
        "tasks.base",
        "regularizers.base",
        "measures.base",
    ),
    "analysis": ("runtime",),
    "integrations": ("core",),
}
SHARED_TASK_MODULES = {"advantages", "base", "image_task", "imagenet_task", "text_task"}


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(
    "path", sorted((ROOT / "ed").glob("*/**/*.py")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_layers_import_only_lower_layers(path):
    layer = path.relative_to(ROOT / "ed").parts[0]
    for name in imported_modules(path):
        if name.startswith("ed.") and not name.startswith(f"ed.{layer}."):
            below = tuple(f"ed.{module}." for module in ALLOWED[layer])
            assert f"{name}.".startswith(below), f"{path} may not import {name}"


def test_core_imports_only_torch():
    standard = set(sys.stdlib_module_names)
    for path in (ROOT / "ed" / "core").glob("*.py"):
        roots = {name.split(".")[0] for name in imported_modules(path)} - standard
        optional = {"tqdm", "matplotlib"}  # for progress bars and plots, imported when used
        assert roots <= {"torch", "ed"} | optional, path


def test_no_concrete_task_imports_another():
    for path in (ROOT / "ed" / "tasks").glob("**/*.py"):
        others = {n.split(".")[2] for n in imported_modules(path) if n.startswith("ed.tasks.")}
        assert others <= SHARED_TASK_MODULES, path


LIGHT = ("ed", "ed.analysis.spec", "ed.analysis.report.page", "ed.engine.errors")
LIGHT += ("ed.figures.ranking", "ed.figures.correlation", "ed.figures.ensembling")
LIGHT += ("ed.figures.grokking", "ed.figures.learning_curves")


def test_light_modules_load_neither_torch_nor_hydra():
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'torch', 'hydra'} & set(sys.modules), name\n"
    )
    words = [sys.executable, "-c", code, *LIGHT]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_type_checkers_see_every_public_name():
    """Type checkers do not see lazy imports, so each name is also imported statically."""
    tree = ast.parse((ROOT / "ed" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    static = {alias.asname: node.module for node in block.body for alias in node.names}
    assert static == ed._EXPORTS
    assert (ROOT / "ed" / "py.typed").exists()
