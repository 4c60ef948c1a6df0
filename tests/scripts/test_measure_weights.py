"""scripts/measure.py: weights in files and from transformers, and errors without them."""

import re
from pathlib import Path

import pytest
import torch

from scripts import measure
from tests.helpers.measuring import QUICK


def save_transformer(kind: str, folder: Path) -> None:
    """Saves a tiny random ViT and its image processor with transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=32, patch_size=16, num_labels=7,
    )  # fmt: skip
    getattr(transformers, kind)(config).save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(folder)


def test_measure_a_transformers_classifier(tmp_path, images, capsys):
    save_transformer("ViTForImageClassification", tmp_path / "model")
    shared = ["--data", str(images), *QUICK, "--out", str(tmp_path / "a.png")]
    measure.main(["--transformers", str(tmp_path / "model"), *shared])
    assert "its own weights" in capsys.readouterr().out
    other = ["--random-weights", "--classes", "4"]
    measure.main(["--transformers", str(tmp_path / "model"), *other, *shared])
    assert re.search(r"  0  2\.500e-01 ", capsys.readouterr().out)  # the mean of four probabilities


def test_half_precision_weights_are_measured_in_float32(tmp_path, images, capsys):
    """Published weights are often in half precision, which transformers preserves."""
    save_transformer("ViTForImageClassification", tmp_path / "model")
    transformers = pytest.importorskip("transformers")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "model").bfloat16()
    model.save_pretrained(tmp_path / "model")  # both files store the same numbers
    torch.save(model.float().state_dict(), tmp_path / "single.pt")
    words = ["--transformers", str(tmp_path / "model"), "--data", str(images), *QUICK]
    words += ["--out", str(tmp_path / "a.png")]
    measure.main(words)
    half = capsys.readouterr().out
    measure.main([*words, "--weights", str(tmp_path / "single.pt")])
    single = capsys.readouterr().out.replace("(single.pt)", "(its own weights)")
    assert half == single


def test_weights_of_a_compiled_data_parallel_model_are_loaded(tmp_path):
    model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    wrapped = torch.nn.DataParallel(torch.compile(model))
    torch.save({"model": wrapped.state_dict()}, tmp_path / "own.pt")
    measure.read_into(other, tmp_path / "own.pt")
    assert torch.equal(other.weight, model.weight)


def test_a_pickled_model_is_rejected_with_a_hint(tmp_path):
    torch.save(torch.nn.Linear(2, 3), tmp_path / "own.pt")
    with pytest.raises(ValueError, match=r"Linear.*model\.state_dict\(\)"):
        measure.read_into(torch.nn.Linear(2, 3), tmp_path / "own.pt")


def test_a_model_without_a_head_is_rejected(tmp_path, images):
    """Without this check, transformers would silently add a random head."""
    save_transformer("ViTModel", tmp_path / "model")
    shared = ["--data", str(images), *QUICK, "--out", str(tmp_path / "a.png")]
    with pytest.raises(ValueError, match=r"--transformers .*classifier\.bias"):
        measure.main(["--transformers", str(tmp_path / "model"), *shared])


def test_weights_with_a_different_number_of_classes_need_an_option(tmp_path, images, capsys):
    import timm

    model = timm.create_model("test_vit", num_classes=4)
    torch.save(model.state_dict(), tmp_path / "four.pt")
    words = ["--timm", "test_vit", "--weights", str(tmp_path / "four.pt"), "--data", str(images)]
    words += [*QUICK, "--out", str(tmp_path / "a.png")]
    with pytest.raises(ValueError, match="--classes N"):
        measure.main(words)
    measure.main([*words, "--classes", "4"])
    assert re.search(r"  0  2\.500e-01 ", capsys.readouterr().out)  # the mean of four probabilities


def test_weights_that_cannot_be_downloaded_raise(monkeypatch):
    """Random weights must be requested explicitly."""
    import timm

    def offline(name, pretrained, num_classes):
        assert pretrained
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ValueError, match="--random-weights"):
        measure.main(["--timm", "test_vit", "--data", "embedded", *QUICK])
