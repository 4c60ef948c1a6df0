"""Puts configs, experiment files and scripts into the wheel as ed/_app; see pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = ("train.py", "configs/**/*.yaml", "experiments/**/*.yaml", "scripts/*.py")


class BuildWithApp(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a clone has these files where they are
            return
        root, app = Path(__file__).parent, Path(self.build_lib) / "ed" / "_app"
        for path in (path for pattern in FILES for path in root.glob(pattern)):
            target = app / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


setup(cmdclass={"build_py": BuildWithApp})
