"""Tests of the wheel: contents, requirements, and use in a new environment."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ed.runtime.extras import EXTRA_OF

ROOT = Path(__file__).parents[2]
SCRIPTS = ("train", "measure", "launch", "table", "report")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the wheel from a copy, because a build writes into the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file() and not name.startswith("tests/") and "/results/" not in name:
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run = subprocess.run(
        [*build, "--no-index", "--wheel-dir", folder, folder / "source"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return next(folder.glob("*.whl"))


def new_environment(folder: Path, wheel: Path) -> Path:
    """Creates a virtual environment with only the wheel; returns its site-packages folder."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    target = ["--prefix", folder / "venv", "--ignore-installed"]
    subprocess.run([*install, *target, wheel], check=True, capture_output=True)
    return next((folder / "venv" / "lib").glob("python*/site-packages"))


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """Creates an environment with the wheel and, through a .pth file, all other packages."""
    folder = tmp_path_factory.mktemp("fresh")
    # excludes editable installs, because .pth files in the added folder are not read
    (new_environment(folder, wheel) / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Creates an environment with only the wheel, torch and torch's requirements."""
    folder = tmp_path_factory.mktemp("bare")
    packages = new_environment(folder, wheel)
    for name in required("torch"):
        for file in metadata.distribution(name).files:
            entry = file.parts[0]
            target, link = Path(file.locate()).parents[len(file.parts) - 2], packages / entry
            if entry not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(target if len(file.parts) > 1 else file.locate())
    return folder


def required(name: str) -> set[str]:
    """Returns the names of a package and of all its requirements."""
    found, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def run_in(fresh: Path, *words: str) -> subprocess.CompletedProcess:
    """Runs the environment's Python in its folder and returns the output and exit code."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "ED_CACHE": str(fresh / "cache")}
    command = [fresh / "venv" / "bin" / "python", *words]
    return subprocess.run(command, cwd=fresh, capture_output=True, text=True, env=environment)


def test_the_wheel_contains_all_files_that_its_commands_need(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        points = archive.read(entry).decode()
    for name in (path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")):
        assert f"ed/_app/{name}" in names
    probes = "experiments/probes/ablations_5_epochs.yaml"
    for name in ("train.py", "scripts/table.py", "experiments/table1.yaml", probes):
        assert f"ed/_app/{name}" in names
    assert "ed/py.typed" in names
    assert not [name for name in names if "/results/" in name or name.startswith("tests")]
    for script in SCRIPTS:
        assert f"ed-{script} = ed.cli:{script}" in points


def test_torch_is_the_only_requirement(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        needed = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist")
    assert [re.match(r"[\w-]+", line)[0] for line in needed if "extra ==" not in line] == ["torch"]


def test_the_readme_example_needs_only_torch(bare):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run = run_in(bare, "-c", f"{code}\nprint(ed.__file__)")
    assert run.returncode == 0, run.stderr
    assert str(bare) in run.stdout.splitlines()[-1]
    others = ["hydra", "omegaconf", "timm", "numpy", "rich", "tqdm", "matplotlib", "safetensors"]
    code = f"from importlib.util import find_spec; print([*map(find_spec, {others})])"
    assert run_in(bare, "-c", code).stdout.strip() == str([None] * len(others))


WITHOUT_EXTRAS = """
import ed, pydoc
from ed import *
assert callable(estimate) and "estimate" in pydoc.render_doc(ed)
from ed import load_run
"""


def test_without_extras_the_package_opens_and_the_rest_names_its_extra(bare):
    run = run_in(bare, "-c", WITHOUT_EXTRAS)
    assert "ModuleNotFoundError: ed.load_run: " in run.stderr.splitlines()[-1]
    assert "'effective-degree[train]'" in run.stderr.splitlines()[-1]
    for script in SCRIPTS:
        run = run_in(bare, f"venv/bin/ed-{script}", "--help")
        assert run.returncode == 1
        assert re.fullmatch(r"error: .*'effective-degree\[train\]'\n", run.stderr), run.stderr


DISTRIBUTION = {"PIL": "pillow", "hydra": "hydra-core", "markdown_it": "markdown-it-py"}
DISTRIBUTION |= {"open_clip": "open-clip-torch", "yaml": "pyyaml"}


def imports(*folders: str) -> set[str]:
    """Returns the top-level names of all imports in these folders of the repository."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    trees = [ast.walk(ast.parse(file.read_text())) for file in files]
    nodes = [node for tree in trees for node in tree]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names}


def extra(name: str) -> set[str]:
    """Returns the packages that an extra of pyproject.toml requires itself or through others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = set()
    for line in project["optional-dependencies"][name]:
        requirement = Requirement(line)
        if requirement.name == "effective-degree":
            found = found.union(*map(extra, requirement.extras))
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def test_every_import_belongs_to_the_extra_that_errors_name():
    """Packages that come with others: omegaconf, markupsafe and cycler."""
    own = {path.stem for path in (ROOT / "scripts").glob("*.py")} | {"ed", "scripts"}
    others = {"torch", "triton", "lightning", "cycler"}  # of lightning, its users have their own
    unknown = imports("ed", "scripts") - set(sys.stdlib_module_names) - own - others
    assert unknown == set(EXTRA_OF)
    for package in unknown - {"omegaconf", "markupsafe"}:
        name = canonicalize_name(DISTRIBUTION.get(package, package))
        assert name in extra(EXTRA_OF[package]), package


# runs console scripts as files, because their first line points to another Python
IN_TURN = """
import json, runpy, sys
for command, *words in json.loads(sys.argv[1]):
    sys.argv = [f"venv/bin/ed-{command}", *words]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, (command, end.code)
"""


def test_commands_work_from_any_folder(fresh):
    """One process runs all commands to save time; those with the most imports come last."""
    commands = [[name, "--help"] for name in ("report", "table", "measure")]
    commands += [["launch", "table1", "--where", "print"]]
    commands += [["train", "debug=tiny", "task.batch_size=500", "model.depth=1", "model.width=32"]]
    run = run_in(fresh, "-c", IN_TURN, json.dumps(commands))
    assert run.returncode == 0, run.stderr
    printed = [shlex.split(line) for line in run.stdout.splitlines() if "run_dir=" in line]
    assert printed
    assert all((fresh / words[1]).is_file() for words in printed)  # those of launch, as printed
    assert list(fresh.glob("runs/adhoc/*/seed0/model.safetensors"))
