"""Published fine-tuned CLIP models, with small generated files in model-soups format."""

import json
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from ed.analysis.tables import load_table
from ed.engine.compose import compose_config
from ed.engine.main import run
from ed.measures.sharpness import Sharpness
from ed.models.clip import build
from ed.models.soup import soup_member
from tests.helpers.measuring import Toy, network

pytest.importorskip("open_clip")

VISION = {"image_size": 32, "patch_size": 16, "width": 32, "layers": 2, "head_width": 16}
TEXT = {"context_length": 8, "vocab_size": 100, "width": 16, "heads": 2, "layers": 1}
ARCHITECTURE = {"embed_dim": 12, "quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT}


def publish(folder: Path, index: int = 3, classes: int = 10) -> dict[str, torch.Tensor]:
    """Writes model_<index>.pt in model-soups format; returns its state.

    Parameter names start with `model.`; the text transformer's blocks are missing.
    """
    torch.manual_seed(index)
    clip = build(ARCHITECTURE)
    named = clip.state_dict().items()
    state = {f"model.{name}": v for name, v in named if not name.startswith("transformer.")}
    state["classification_head.weight"] = torch.randn(classes, 12)
    state["classification_head.bias"] = torch.randn(classes)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"model_{index}.pt")
    return state


def test_a_model_applies_its_head_to_normalised_features(tmp_path):
    state = publish(tmp_path)
    model = soup_member(str(tmp_path), index=3, architecture=ARCHITECTURE, classes=10).eval()
    tower = build(ARCHITECTURE).eval()
    own = {name.removeprefix("model.visual."): v for name, v in state.items() if "visual" in name}
    tower.visual.load_state_dict(own)
    x = torch.randn(5, 3, 32, 32)
    features = tower.encode_image(x)
    features = features / features.norm(dim=-1, keepdim=True)
    head = state["classification_head.weight"], state["classification_head.bias"]
    expected = torch.nn.functional.linear(features, *head)
    torch.testing.assert_close(model(x), expected)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    counted = {name for name in state if "visual" in name or "head" in name}
    assert len(list(model.parameters())) == len(counted)  # the text tower is not loaded


def test_missing_truncated_and_incompatible_files_raise_one_line_errors(tmp_path):
    def member(index=3, classes=10):
        return soup_member(str(tmp_path), index=index, architecture=ARCHITECTURE, classes=classes)

    publish(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model.index=7.*model_7.pt"):
        member(index=7)
    with pytest.raises(ValueError, match=r"model.index=3"):
        member(classes=11)
    recipes = tmp_path / "hparam_info.json"
    for text in ('{"model_1": {}}', '{"model_3": {"lr"', '{"model_3": 3}', "3", "[" * 100_000):
        recipes.write_text(text)
        with pytest.raises(ValueError, match=r"hparam_info.json.*model_3"):
            member()
    recipes.unlink()
    assert member().recipe is None
    path = tmp_path / "model_3.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.index=3"):
        member()
    torch.save({"fc.weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"model.architecture"):
        member()


SMALL = ["task=soup", "task.data=embedded", "task.classes=10", "task.image_size=[32,32]"]
SMALL += ["task.examples=300", "model=clip_soup", "model.index=3", "measures=soup"]
SMALL += [f"measures.ed{kind}_pca{m}.{s}" for kind in ("", "_norm") for m in (1, 3, 10)
          for s in ("pairs=3", "resolution=20", "degree=4")]  # fmt: skip
SMALL += [f"measures.{kind}sharpness.{s}" for kind in ("", "adaptive_")
          for s in ("examples=64", "group=32", "batch_size=32")]  # fmt: skip
SMALL += ["precision=float32", "system.device=cpu", "system.workers=0"]


def measure(tmp_path: Path, *overrides: str) -> dict:
    cfg = compose_config(
        [*SMALL, f"model.folder={tmp_path}/soups", f"system.run_dir={tmp_path}/run", *overrides]
    )
    cfg.model.architecture = ARCHITECTURE
    return run(cfg, ["soup"])


def test_a_published_model_is_measured_without_training(tmp_path, capsys):
    state = publish(tmp_path / "soups")
    recipe = {"aug": None, "lr": 1e-5, "mix": 0.3}
    (tmp_path / "soups" / "hparam_info.json").write_text(json.dumps({"model_3": recipe}))
    summary = measure(tmp_path)
    wanted = set(load_table("correlation_clip").metrics)
    assert wanted <= set(summary["last"])
    assert summary["steps"] == 0
    last = summary["last"]
    assert last["eval/acc"] == last["measure/gap_test"]
    assert last["measure/gap"] == last["measure/gap_train"] - last["measure/gap_test"]
    squares = sum(v.square().sum() for n, v in state.items() if "visual" in n or "head" in n)
    assert last["measure/norm"] == pytest.approx(float(squares.sqrt()), rel=1e-5)
    assert json.loads((tmp_path / "run" / "DONE").read_text())["last"] == last
    (session,) = json.loads((tmp_path / "run" / "meta.json").read_text())["sessions"]
    assert session["recipe"] == recipe
    log = (tmp_path / "run" / "train.log").read_text()
    assert "2,000 images instead of the 1,281,167" in log
    assert measure(tmp_path) == summary
    assert "already done" in capsys.readouterr().out
    other = measure(tmp_path, "measures.sharpness.examples=32")["last"]
    assert {name for name in last if last[name] != other[name]} == {
        f"measure/sharpness_{rho}" for rho in (0.01, 0.05, 0.1)
    }


def test_all_models_are_measured_on_the_same_images():
    cfg = compose_config([*SMALL, "task.examples=5", "task.image_size=[28,28]"])
    batches = []
    for seed in (0, 1):
        task = instantiate(cfg.task)
        task.workers = 0
        task.prepare(torch.device("cpu"), seed)
        assert (task.num_examples, task.total_steps) == (5, 0)
        batches.append(task.examples(torch.tensor([4, 1])))
    assert torch.equal(batches[0]["x"], batches[1]["x"])
    first, second = (task.train.image(int(task.chosen[place])) for place in (4, 1))
    expected = torch.stack([task.views.evaluate(image) for image in (first, second)])
    assert torch.equal(batches[0]["x"], expected)
    assert task.chosen.tolist() != sorted(task.chosen.tolist())  # images are drawn at random


def test_a_mismatched_image_size_is_rejected(tmp_path):
    publish(tmp_path / "soups")
    with pytest.raises(ValueError, match=r"task.image_size=\[48, 48\]"):
        measure(tmp_path, "task.image_size=[48,48]")


def test_each_image_is_read_once_for_all_radii():
    class Counting(Toy):
        reads = 0

        def examples(self, index):
            self.reads += 1
            return super().examples(index)

    task, settings = Counting(), {"radii": (0.01, 0.1), "examples": 40, "group": 20}
    whole = Sharpness(**settings, batch_size=20)(network(), task)
    assert task.reads == 2
    parts = Sharpness(**settings, batch_size=7)(network(), task)
    assert whole == pytest.approx(parts, rel=1e-9)


def test_the_two_figures_show_each_published_model_once():
    names = [c.name for t in ("correlation_clip", "correlation_clip_mixup")
             for c in load_table(t).cells.values()]  # fmt: skip
    assert sorted(names) == sorted(f"model-{index}" for index in range(1, 72))
    assert len(load_table("correlation_clip_mixup").cells) == 32
