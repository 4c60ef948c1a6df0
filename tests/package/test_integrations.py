"""Tests of all examples, and of the callbacks and the trainer with the real packages."""

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ed
from ed.integrations import QUICK, track
from tests.helpers.commands import run_command

ROOT = Path(__file__).parents[2]
EXAMPLES = {"plain_loop": None, "timm_features": None}
EXAMPLES |= {"huggingface_trainer": "accelerate", "lightning_module": "lightning"}
FEW = {"pairs": 5, "resolution": 8, "degree": 4}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    if EXAMPLES[name]:
        pytest.importorskip(EXAMPLES[name])
    if name == "huggingface_trainer":
        importlib.import_module("transformers.trainer")  # here, for all tests that fork
    run = run_command([f"examples/{name}.py"])
    assert run.returncode == 0, run.stderr
    assert re.search(r"ED \d", run.stdout), run.stdout


def test_every_example_is_short_and_tested():
    files = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
    assert files.keys() == EXAMPLES.keys()
    for path in [*files.values(), *(ROOT / "ed" / "integrations").glob("*.py")]:
        most = 40 if path.stem in files else 60
        assert len(path.read_text().splitlines()) < most, path


def test_tracked_values_equal_estimate():
    model, x = nn.Linear(4, 3), torch.randn(20, 4)
    expected = ed.estimate(model, x, **QUICK | FEW).mean
    assert track(model, x, **FEW) == expected
    assert track(model, lambda m: ed.Field.of(m, x), **FEW) == expected
    for inputs in (x.double(), x.numpy(), {"input": x}, (x,)):  # as for ed.estimate
        assert track(model, inputs, **FEW) == expected
    loader = torch.utils.data.DataLoader(x, batch_size=10)  # read as far as 5 paths need
    assert track(model, loader, **FEW) == track(model, x[:10], **FEW)


def test_tracking_features_does_not_change_the_random_state():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3))
    before = torch.get_rng_state()
    track(model, lambda m: ed.Field.at_layer(m, "1", torch.ones(20, 4)), **FEW)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training for part in model.modules())


def test_lightning_logs_ed_every_second_epoch():
    pl = pytest.importorskip("lightning.pytorch")
    from ed.integrations.lightning import TrackED
    from examples.lightning_module import Classifier

    class Noting(TrackED):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            seen.append(float(trainer.callback_metrics.get("degree", math.nan)))

    seen, x = [], torch.randn(16, 8)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, torch.randint(3, (16,))), batch_size=8
    )
    module = Classifier()
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callback = Noting(x, every=2, name="degree", **FEW)
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback], accelerator="cpu", **off)
    trainer.fit(module, loader)
    assert math.isnan(seen[0])
    assert float(trainer.callback_metrics["degree"]) == pytest.approx(
        ed.estimate(module, x, **FEW).mean,
        rel=1e-5,  # logged as float32
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_adds_the_penalty_to_the_loss(tmp_path, accumulate):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    from ed.integrations.transformers import EDTrainer, TrackED

    class Penalised(EDTrainer, Trainer):
        ed_weight = 0.0

    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"image_size": 8, "patch_size": 4, "num_labels": 3, "intermediate_size": 16}
    data = [{"pixel_values": torch.randn(3, 8, 8), "labels": i % 3} for i in range(16)]
    pixels = torch.stack([row["pixel_values"] for row in data])
    weights = {}
    for kind, weight in ((Trainer, None), (Penalised, 0.0), (Penalised, 5.0)):
        torch.manual_seed(0)
        model = ViTForImageClassification(ViTConfig(**size, hidden_dropout_prob=0.0))
        arguments = TrainingArguments(
            tmp_path, num_train_epochs=2, per_device_train_batch_size=4, report_to="none",
            gradient_accumulation_steps=accumulate, save_strategy="no", use_cpu=True,
            learning_rate=1e-2, max_grad_norm=0.0, optim="sgd",
        )  # fmt: skip
        trainer = kind(model, arguments, train_dataset=data)
        trainer.ed_weight = weight
        trainer.add_callback(TrackED(trainer, pixels, every=2, name="degree", **FEW))
        trainer.train()
        tracked = [row["degree"] for row in trainer.state.log_history if "degree" in row]
        assert tracked == [pytest.approx(ed.estimate(model, pixels, **FEW).mean)]
        weights[weight] = model.classifier.weight.detach()
    torch.testing.assert_close(weights[0.0], weights[None])
    assert not torch.allclose(weights[5.0], weights[0.0], rtol=1e-3)


def test_padding_does_not_change_the_penalty_of_a_token_classifier():
    """Labels of padding are -100, as from DataCollatorForTokenClassification."""
    transformers = pytest.importorskip("transformers")
    from ed.integrations.transformers import EDTrainer

    class Base:
        model_accepts_loss_kwargs, compute_loss_func = False, None
        current_gradient_accumulation_steps = 1

        def compute_loss(self, model, inputs, return_outputs, items):
            return torch.zeros(()), None

    class Penalised(EDTrainer, Base):
        ed_settings = {"class_dim": -1}  # noqa: RUF012

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.BertConfig(vocab_size=50, intermediate_size=16, **size)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(config).double().train()
    batch = {"input_ids": torch.randint(1, 50, (6, 5)), "labels": torch.randint(3, (6, 5))}
    batch["attention_mask"] = torch.ones(6, 5, dtype=torch.int64)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    padded = {k: nn.functional.pad(batch[k], [0, 3], value=x) for k, x in fill.items()}
    losses = []
    for inputs in (batch, padded):
        torch.manual_seed(1)
        losses.append(Penalised().compute_loss(model, inputs))
    assert losses[0] > 0
    torch.testing.assert_close(*losses)


def test_every_must_be_positive():
    pytest.importorskip("lightning")
    from ed.integrations.lightning import TrackED

    with pytest.raises(ValueError, match=r"^every=0"):
        TrackED(torch.zeros(2, 3), every=0)


@pytest.mark.parametrize(("scaled", "expected"), [(None, 1 / 4), (True, 1 / 4), (False, 1)])
def test_the_penalty_is_scaled_like_the_loss(scaled, expected, monkeypatch):
    pytest.importorskip("transformers")
    from ed.integrations.transformers import EDTrainer

    class Base:
        model_accepts_loss_kwargs, compute_loss_func = True, None
        current_gradient_accumulation_steps, loss_is_scaled_for_ga = 4, scaled

        def compute_loss(self, model, inputs, return_outputs, items):
            return torch.zeros(()), None

    class Penalised(EDTrainer, Base):
        ed_weight = 1.0

    monkeypatch.setattr(ed, "penalty", lambda *_, **__: torch.ones(()))
    batch = {"pixel_values": torch.randn(4, 3), "labels": torch.zeros(4)}
    loss = Penalised().compute_loss(nn.Linear(3, 2), batch, num_items_in_batch=4)
    assert loss.item() == expected
    with pytest.raises(ValueError, match="no labels"):
        Penalised().compute_loss(nn.Linear(3, 2), {"pixel_values": torch.randn(4, 3)})


def test_a_compiled_model_has_a_field():
    pytest.importorskip("transformers")
    from ed.integrations.transformers import field_of

    compiled = torch.compile(nn.Linear(3, 2), backend="eager")
    assert field_of(compiled, {"pixel_values": torch.randn(4, 3)}).module is compiled
