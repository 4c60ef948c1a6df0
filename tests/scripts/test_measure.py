"""scripts/measure.py and scripts/theory.py: output, figures and errors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from ed.datasets.images import EMBEDDED
from ed.tasks.pnn import uniform_inputs
from scripts import measure, theory
from tests.helpers.measuring import QUICK
from tests.helpers.small import small_run

ROOT = Path(__file__).parents[2]


def printed(capsys) -> tuple[float, float, float, list[str]]:
    """Returns the printed ED, its confidence limits and the lines of the spectrum."""
    text = capsys.readouterr().out
    number = r"([-\d.e]+)"
    found = re.search(rf"ED\w* {number}, 95 % confidence interval \[{number}, {number}\]", text)
    return *map(float, found.groups()), re.findall(
        r"^ +\d+  \S+(?:  #+)?$", text, flags=re.MULTILINE
    )


def test_measure_stays_within_its_memory_budget(tmp_path):
    """Uses 1000 classes and the paper's r and K, but fewer pairs."""
    code = (  # not ru_maxrss, which starts at the parent's memory
        "import pathlib, re, runpy, sys, timm, datasets, matplotlib.pyplot, torch\n"
        "torch.set_num_threads(1)\n"
        "status = pathlib.Path('/proc/self/status').read_text\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', status())[1]) / 2**20\n"
        "before = peak()\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print('GiB', peak() - before)\n"
    )
    out = tmp_path / "paths.png"
    arguments = ["--timm", "test_vit", "--random-weights", "--data", "embedded", "--pairs", "2"]
    arguments += ["--memory-gib", "0.25", "--out", str(out)]
    code = f"import sys; sys.argv = ['scripts/measure.py', *{arguments!r}]\n{code}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "test_vit (random weights), r = 200, K = 40" in result.stdout
    assert len(re.findall(r"^ +\d+  \S+(?:  #+)?$", result.stdout, flags=re.MULTILINE)) == 41
    assert float(result.stdout.split("GiB")[1]) < 0.75  # covers one chunk, all paths and the model
    assert Image.open(out).size[0] > 1000


def test_measure_your_own_images_and_weights(tmp_path, images, capsys):
    import timm

    torch.manual_seed(0)
    model = timm.create_model("test_vit", pretrained=False)
    with torch.no_grad():
        model.head.weight.mul_(100)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "own.pt")
    shared = ["--timm", "test_vit", "--data", str(images), *QUICK]
    shared += ["--out", str(tmp_path / "a.png")]
    measure.main([*shared, "--weights", str(tmp_path / "own.pt")])
    own, low, high, lines = printed(capsys)
    assert low < own < high
    assert len(lines) == 7
    measure.main([*shared, "--random-weights"])
    assert printed(capsys)[0] < own / 3
    measure.main([*shared, "--random-weights", "--components", "2", "--normalised"])
    assert "ED_norm" in capsys.readouterr().out


def test_bars_have_a_logarithmic_scale():
    lines = measure.bars(torch.tensor([0.5, 5.0, 0.0]))
    assert [line.count("#") for line in lines] == [32, 40, 0]


def test_a_run_is_measured_on_its_own_training_set(tmp_path, capsys):
    settings = ["measures=ed", "measures.ed.pairs=6", "measures.ed.resolution=20"]
    summary = small_run(tmp_path / "run", *settings, "measures.ed.degree=6")
    capsys.readouterr()
    measure.main(["--run", str(tmp_path / "run"), *QUICK, "--out", str(tmp_path / "a.png")])
    mean, low, high, _ = printed(capsys)
    assert mean == pytest.approx(summary["last"]["measure/ed"], rel=1e-3)
    error = summary["last"]["measure/ed_se"]
    assert [mean - low, high - mean] == pytest.approx([1.96 * error] * 2, rel=1e-2)
    with pytest.raises(FileNotFoundError, match=rf"did you mean {tmp_path}/run\?"):
        measure.main(["--run", str(tmp_path), *QUICK])


def test_regression_outputs_are_measured_without_softmax(tmp_path, capsys):
    """The softmax of a regression output would be meaningless."""
    base = ["task=pnn", "task.steps=2", "task.warmup_steps=0", "task.examples=20", "model=pnn"]
    base += ["measures=ed", "measures.ed.pairs=6", "measures.ed.resolution=20", "seed=1"]
    base += ["measures.ed.degree=6", "measures.ed.outputs=raw", "model.width=4"]
    last = small_run(tmp_path / "run", "system.device=cpu", base=base)["last"]
    words = ["--run", str(tmp_path / "run"), *QUICK, "--out", str(tmp_path / "a.png")]
    with pytest.raises(ValueError, match=r"--run .*--raw-outputs"):
        measure.main(words)
    capsys.readouterr()
    measure.main([*words, "--raw-outputs"])
    assert printed(capsys)[0] == pytest.approx(last["measure/ed"], rel=1e-3)
    model = measure.load_run(tmp_path / "run", "cpu").model
    assert not model.training
    torch.save({name: 2 * value for name, value in model.state_dict().items()}, tmp_path / "2.pt")
    measure.main([*words, "--raw-outputs", "--weights", str(tmp_path / "2.pt")])
    assert printed(capsys)[0] > 2 * last["measure/ed"]


def test_options_are_passed_to_the_estimator(images, monkeypatch):
    calls = []

    def note(field, **how):
        calls.append((field, how))
        raise InterruptedError

    monkeypatch.setattr(measure, "estimate", note)
    words = ["--timm", "test_vit", "--random-weights", "--data", str(images), *QUICK]
    own = ["--basis", "legendre", "--components", "2", "--seed", "3", "--pairs", "2"]
    own += ["--memory-gib", "0.25"]
    for more in (own, [*own, "--raw-outputs"], [*own, "--normalised"]):
        with pytest.raises(InterruptedError):
            measure.main([*words, *more])
        field, how = calls[-1]
        assert len(field.x) == 4  # two paths have four endpoints
        assert (how["pairs"], how["seed"], how["memory_gib"]) == (2, 3, 0.25)
        found = how["representation"]
        assert (found.resolution, found.degree, found.basis, found.components) == (
            *(20, 6),
            *("legendre", 2),
        )
    assert [how["softmax"] for _, how in calls] == [True, False, False]
    weightings = [how["representation"].weighting for _, how in calls]
    assert weightings == ["raw", "raw", "normalised"]


def test_too_few_nodes_are_reported_once(images, tmp_path):
    words = ["--timm", "test_vit", "--random-weights", "--data", str(images), *QUICK]
    words += ["--pairs", "2", "--resolution", "4", "--out", str(tmp_path / "paths.png")]
    with pytest.warns(UserWarning, match="^resolution=4: ") as warnings:
        measure.main(words)
    ours = [warning for warning in warnings if "resolution=" in str(warning.message)]
    assert [Path(warning.filename).name for warning in ours] == ["measure.py"]


def test_images_at_path_ends_are_denormalised(tmp_path, images):
    """Tests a run with standardised inputs and a timm model."""
    small_run(tmp_path / "run")
    protocol = measure.EffectiveDegree(pairs=6, resolution=20, degree=6, seed=5)
    options = measure.parse(["--run", str(tmp_path / "run"), *QUICK])
    subject = measure.of_run(options, protocol, "cpu")
    mean = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
    std = torch.tensor([0.2023, 0.1994, 0.2010])[:, None, None]
    for index, x in enumerate(subject.field.x):
        torch.testing.assert_close(subject.image(index), (x * std + mean).clamp(0, 1))
    words = ["--timm", "test_vit", "--random-weights", "--data", str(images)]
    subject = measure.of_name(measure.parse([*words, *QUICK]), "cpu")
    for index, x in enumerate(subject.field.x):  # test_vit uses mean and std 0.5
        torch.testing.assert_close(subject.image(index), (x + 1) / 2)
    again = measure.of_name(measure.parse([*words, *QUICK]), "cpu").field.module
    # the seed determines random weights
    assert torch.equal(again.head.weight, subject.field.module.head.weight)
    one = [[*words, *QUICK, "--pairs", "1", "--seed", seed] for seed in "012"]
    titles = [measure.of_name(measure.parse(words), "cpu").titles for words in one]
    assert len({tuple(pair) for pair in titles}) > 1  # the seed selects two of five images


def test_the_figure_shows_measured_paths(tmp_path, images, monkeypatch):
    """The first images in a folder would be a poor choice: they may all be of one class."""
    drawn = []
    monkeypatch.setattr(measure, "draw_portraits", lambda *given, **how: drawn.append((given, how)))
    named = ["--timm", "test_vit", "--random-weights", "--data", str(images)]
    measure.main([*named, *QUICK, "--out", str(tmp_path / "a.png")])
    ((_, (portrait,)), how) = drawn[0]
    own = portrait.estimate.representation.degrees(portrait.coefficients)
    torch.testing.assert_close(own, portrait.estimate.values[: len(own)])
    left, right = portrait.estimate.ends.T[0].flip(0).tolist()  # x2 is drawn on the left
    assert [title for _, title in how["ends"]][:2] == [f"image {left}", f"image {right}"]
    for more in (["--components", "2"], ["--raw-outputs"]):
        measure.main([*named, *QUICK, *more, "--out", str(tmp_path / "a.png")])
    assert [how["name"](2) for _, how in drawn] == ["class 2", "PC 2", "output 2"]


def test_a_run_on_imagenet_shows_its_images(tmp_path, monkeypatch):
    settings = ["task=imagenet", "task.data=embedded", "task.classes=10", "task.image_size=[32,32]"]
    settings += [
        "task.batch_size=500",
        "task.epochs=1",
        "task.warmup_epochs=0",
        "task.eval_every=1",
    ]
    settings += ["model=vit_micro", "system.workers=0", "system.device=cpu"]
    small_run(tmp_path / "run", *settings, base=[])
    drawn = []
    monkeypatch.setattr(measure, "draw_portraits", lambda *given, **how: drawn.append(how["ends"]))
    measure.main(["--run", str(tmp_path / "run"), *QUICK, "--out", str(tmp_path / "a.png")])
    for image, _ in drawn[0]:
        assert image.std() > 0.01  # the image is not blank
        assert 0 <= image.min() < image.max() <= 1


def test_images_without_classes_have_numbers_as_titles(tmp_path, monkeypatch):
    pytest.importorskip("open_clip")
    settings = ["task=clip_standin_pretrain", "model=clip_small_pretrain", "debug=tiny"]
    settings += ["task.batch_size=200", "task.part=0.1", "model.architecture.embed_dim=16"]
    small = {"vision_cfg": ("patch_size=16", "width=32", "layers=1", "head_width=16")}
    small["text_cfg"] = ("width=16", "layers=1")
    settings += [f"model.architecture.{key}.{s}" for key, words in small.items() for s in words]
    small_run(tmp_path / "run", *settings, base=[])
    drawn = []
    monkeypatch.setattr(measure, "draw_portraits", lambda *given, **how: drawn.append(how["ends"]))
    measure.main(["--run", str(tmp_path / "run"), *QUICK, "--out", str(tmp_path / "a.png")])
    assert all(re.fullmatch(r"example \d+", title) for _, title in drawn[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timm", "resnet5o", "--data", "embedded"], "--timm resnet5o.*resnet50"),
        (["--timm", "resnet50"], "--data"),
        (["--timm", "resnet50", "--data", "/no/folder"], "--data=/no/folder"),
        (["--timm", "resnet50", "--data", "EMPTY"], "--data .*empty: 0 images"),
        (["--timm", "resnet50", "--data", "embedded", "--split", "dev"], "split 'dev'"),
        (["--timm", "resnet50", "--data", "EMPTY", "--split", "dev"], "^--split dev: "),
        (["--run", "EMPTY"], "--run .*empty"),
        (["--run", "RUN", "--data", "embedded"], "^--data: "),
        (["--run", "RUN", "--split", "train"], "^--split: "),
        (["--timm", "vit_tiny_patch16_224_none", "--data", "embedded"], "--timm "),
        (["--timm", "vovnet39a", "--data", "embedded"], "--timm vovnet39a.*--weights"),
        (["--timm", "test_vit", "--weights", "w.pt", "--data", "embedded"], "--weights w.pt"),
        (
            ["--timm", "test_vit", "--device", "gpu", "--data", "embedded"],
            "^--device gpu",
        ),
    ],
)
def test_invalid_arguments_raise_one_line_errors(arguments, message, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    places = {"EMPTY": str(tmp_path / "empty"), "RUN": str(tmp_path / "run")}
    (tmp_path / "empty").mkdir()
    arguments = [places.get(word, word) for word in arguments]
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        measure.main([*QUICK, *arguments])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--random-weights", "--weights", "w.pt"], "--random-weights: "),
        (["--classes", "4"], "--classes: "),
    ],
)
def test_options_that_would_be_ignored_are_rejected(more, message, capsys):
    with pytest.raises(SystemExit):
        measure.parse(["--timm", "test_vit", "--data", "embedded", *more])
    assert message in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error(tmp_path, images):
    """For example, `measure.py | head -1` must not print a traceback."""
    words = ["--timm", "test_vit", "--random-weights", "--data", str(images), *QUICK]
    words = [sys.executable, ROOT / "scripts/measure.py", *words, "--out", tmp_path / "a.png"]
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    result = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert b"Broken" not in result.stderr


@pytest.mark.parametrize(
    ("out", "message"), [("nowhere/a.png", "nowhere; make it first"), ("a.txt", "ends in .png")]
)
def test_an_invalid_figure_path_is_rejected_immediately(out, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        measure.main(["--timm", "test_vit", "--data", "embedded", "--out", str(tmp_path / out)])
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        theory.main(["--paths", "100", "--out", str(tmp_path / out)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("keep", [8, 1000], ids=["no image", "cut off"])
def test_a_broken_image_is_reported(images, tmp_path, keep):
    whole = (images / "0.png").read_bytes()
    (images / "broken.png").write_bytes(whole[:keep])
    arguments = ["--timm", "test_vit", "--random-weights", "--data", str(images), *QUICK]
    with pytest.raises(ValueError, match=r"--data: .*broken\.png"):
        measure.main([*arguments, "--out", str(tmp_path / "a.png")])


def test_an_image_of_16_bits_is_reported(images):
    Image.new("I;16", (40, 50), 500).save(images / "deep.png")  # would become all white
    *_, deep = measure.list_images(str(images), None)
    with pytest.raises(ValueError, match=r"--data: .*deep\.png.*I;16"):
        measure.opened(deep)


def test_images_in_a_file_are_listed():
    assert len(measure.list_images(str(next(EMBEDDED.glob("test*.parquet"))), None)) > 1


def test_hidden_images_are_not_measured(images):
    (images / "._0.png").write_bytes(b"not an image")
    assert len(measure.list_images(str(images), None)) == 5


def test_theory_prints_the_degree_of_each_map(tmp_path, capsys, monkeypatch):
    saved = []
    monkeypatch.setattr(theory, "save", lambda figure, path: saved.append((figure, path)))
    theory.main(["--paths", "1000", "--out", str(tmp_path / "theory.png")])
    printed = capsys.readouterr().out
    degrees = [float(value) for value in re.findall(r"ED ([\d.]+)", printed)]
    assert degrees == pytest.approx([0.667, 1.187, 2.972], rel=0.15)
    error = float(re.search(r"degree 1: .* \+- ([\d.]+)", printed)[1])
    # standard error of the mean of three |v| / 2, with v the difference of two uniform numbers
    assert error == pytest.approx((2 / 27 / 1000) ** 0.5, rel=0.1)
    ((figure, path),) = saved  # a test of the documentation's commands writes the image
    assert len(figure.axes) >= 12
    assert path == tmp_path / "theory.png"


def test_theory_agrees_with_its_lemma():
    """Checks the leading coefficient of each output and that all higher ones are zero."""
    inputs = uniform_inputs(40, torch.Generator().manual_seed(0))
    for number, leading in theory.leading_parts(inputs).items():
        found = theory.on_paths(number, inputs).abs()
        for output, degree in enumerate(theory.DEGREES[number]):
            torch.testing.assert_close(found[:, output, degree], leading[:, output])
            assert found[:, output, degree + 1 :].max() < 1e-12
