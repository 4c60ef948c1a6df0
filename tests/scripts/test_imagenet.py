"""ImageNet scripts: the folder check and the input benchmark."""

import runpy
from pathlib import Path

import pytest

from ed.datasets.imagenet import shifts
from tests.helpers.imagenet import fill

ROOT = Path(__file__).parents[2]


def script(name: str) -> dict:
    return runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))


def test_the_check_lists_problems(tmp_path, capsys):
    shift = shifts()["a"]
    fill(tmp_path / "imagenet-a", list(shift.labels)[1:])
    broken = tmp_path / "imagenet-a" / "n01531178" / "0.JPEG"
    broken.write_bytes(b"no image")
    assert script("check_imagenet")["main"](["--shifts", str(tmp_path), "--decode", "200"]) == 1
    found = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in found.splitlines()}
    assert rows["ImageNet-A"][1:6] == ["199", "200", "199", "7,500", "incomplete"]
    assert rows["ObjectNet"][1:6] == ["0", "113", "0", "18,574", "incomplete"]
    assert "ImageNet-A: 1 of 200 class folders are missing (n01498041)" in found
    assert f"ImageNet-A: {broken} " in found


def test_the_check_reports_empty_and_missing_folders(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    assert script("check_imagenet")["main"](["--data", str(tmp_path), "--decode", "3"]) == 1
    found = capsys.readouterr().out
    assert "train: 1000 of 1000 class folders are missing (n01440764, n01443537" in found
    assert f"validation: {tmp_path}/val: no such folder" in found


def test_a_complete_data_set_passes_the_check(tmp_path):
    check = script("check_imagenet")
    root = fill(tmp_path, ["n1", "n2"], count=3)
    for images, problems in ((6, []), (8, ["-2 images"])):
        report = check["Report"]("set", images, classes=2)
        report = check["check_folders"](report, lambda: root, {"n1": 0, "n2": 1})
        assert report.problems == problems
        assert (report.found_classes, report.found_images) == (2, 6)


def test_the_input_benchmark_runs(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    words = ["task.data=embedded", "task.image_size=[16,16]", "task.batch_size=64", "--steps", "2"]
    words += ["model.width=16", "model.heads=2", "model.depth=1", "system.device=cpu"]
    script("benchmark_input")["main"](["--seconds", "0.1", *words, "system.workers=1"])
    assert capsys.readouterr().out.count("images/s") == 6
    with pytest.raises(ValueError, match="use task=imagenet"):
        script("benchmark_input")["main"](["task=cifar10_mini", "model=vit_micro"])
