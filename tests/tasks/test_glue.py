"""GLUE: models split after their embeddings, padding, metrics and real data sets."""

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from torch.utils._python_dispatch import TorchDispatchMode

import ed
from ed.engine.check import check
from ed.engine.checkpoint import load_checkpoint
from ed.engine.compose import compose_config
from ed.engine.loop import Interrupted
from ed.engine.main import run
from ed.models.text import TextClassifier
from ed.regularizers.base import Regularizer, StepState
from ed.tasks.glue import COLUMNS, load_split, matthews
from ed.tasks.text_task import load_tokenizer
from tests.helpers.small import weights
from tests.helpers.text import ARCHITECTURES, make_model, make_task, write_checkpoint

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_split_model_equals_the_original(architecture, tmp_path):
    """Embedding first and encoding later gives the same outputs, with and without padding."""
    folder = write_checkpoint(tmp_path, architecture)
    model = make_model(folder)
    torch.manual_seed(1)
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    whole.double().eval()
    ids = torch.randint(5, 20, (3, 10))
    mask = torch.ones_like(ids)
    ids[0, 6:], mask[0, 6:] = 1, 0
    segments = torch.randint(2, ids.shape)
    own = {"token_type_ids": segments} if architecture in ("bert", "roberta", "electra") else {}
    ours = model(model.embed(ids, segments), mask)
    theirs = whole(input_ids=ids, attention_mask=mask, **own).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_longest_is_the_maximum_length(architecture, tmp_path):
    model = make_model(write_checkpoint(tmp_path, architecture))
    ids = torch.full((1, model.longest + 1), 7)
    model.embed(ids[:, 1:], torch.zeros_like(ids[:, 1:]))
    with pytest.raises((IndexError, RuntimeError)):
        model.embed(ids, torch.zeros_like(ids))


def test_outputs_at_path_ends_equal_outputs_on_sentences(data, checkpoint):
    task, model = make_task(data, checkpoint), make_model(checkpoint)
    batch = task.train.batch(torch.arange(8), None)
    field = task.field(model, batch)
    assert len(set(task.train.lengths[:8].tolist())) > 2  # sentences have different lengths
    torch.manual_seed(1)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    ordinary = load(checkpoint, num_labels=2).double().eval()
    tokens = [ids[:n] for ids, n in zip(batch["ids"], task.train.lengths, strict=False)]
    alone = torch.cat([ordinary(input_ids=ids[None]).logits for ids in tokens])  # no padding
    torch.testing.assert_close(field(), alone, rtol=1e-10, atol=1e-13)
    first, second = torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    outputs = field.between(first, second, ends)().unflatten(0, (3, 2))
    torch.testing.assert_close(outputs[:, 0], alone[second], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(outputs[:, 1], alone[first], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["cola", "rte"])
def test_padding_does_not_change_outputs(data, checkpoint, name):
    model = make_model(checkpoint)
    task = make_task(data, checkpoint, name)
    batch = task.validation.batch(torch.arange(30), None)
    wider = {key: torch.nn.functional.pad(batch[key], (0, 9)) for key in ("ids", "segments")}
    wider |= {"mask": torch.nn.functional.pad(batch["mask"], (0, 9))}
    expected = task.field(model, batch)()
    torch.testing.assert_close(task.field(model, wider)(), expected, rtol=1e-10, atol=1e-12)
    dynamic = make_task(data, checkpoint, name, padding="dynamic")
    assert dynamic.evaluate(model) == pytest.approx(task.evaluate(model), abs=1e-9)
    assert (task.static_shapes, dynamic.static_shapes) == (True, False)


def test_batches_of_different_lengths_cannot_be_captured():
    text = ["task=glue", "model=bert_base", "task.padding=dynamic"]
    cfg = compose_config([*text, "system.cuda_graph=true"])
    with pytest.raises(ValueError, match=r"^system\.cuda_graph=true: .*task\.padding"):
        check(cfg, instantiate(cfg.task), Regularizer())


@pytest.mark.parametrize("length", [24, 12])
def test_tokens_equal_the_tokenizers_padded_output(data, checkpoint, length):
    """Tokens are equal up to the longest sentence; the rest is padding."""
    task = make_task(data, checkpoint, "rte", max_length=length)
    table = load_split(data, "rte", "train")
    encoded = load_tokenizer(checkpoint)(
        *(table[column].to_pylist() for column in ("sentence1", "sentence2")),
        truncation=True,
        max_length=length,
        padding="max_length",
        return_token_type_ids=True,
        return_tensors="pt",
    )
    width = task.train.ids.shape[1]
    assert width == min(length, 8 * -(-int(task.train.lengths.max()) // 8))
    assert not encoded["attention_mask"][:, width:].any()
    assert torch.equal(task.train.ids, encoded["input_ids"][:, :width])
    assert torch.equal(task.train.segments, encoded["token_type_ids"][:, :width])
    assert torch.equal(task.train.mask, encoded["attention_mask"][:, :width])
    assert task.train.labels.tolist() == table["label"].to_pylist()
    index = torch.tensor([5, 0, 7])
    batch = task.train.batch(index, 9)
    names = {"ids": "input_ids", "segments": "token_type_ids", "mask": "attention_mask"}
    for ours, theirs in names.items():
        assert torch.equal(batch[ours], encoded[theirs][index, :9]), ours
    assert torch.equal(batch["label"], task.train.labels[index])


def test_gradient_of_ed_equals_finite_differences(data, checkpoint):
    task, model = make_task(data, checkpoint), make_model(checkpoint)
    batch = task.train.batch(torch.arange(4), 8)
    field = task.field(model, batch)

    def degree(x):
        generator = torch.Generator().manual_seed(0)
        moved = field.at(x)
        paths = ed.Paths.draw(
            moved, ed.Representation(), 3, labels=batch["label"], generator=generator
        )
        return paths.degrees(paths.field()).mean()

    x = field.x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(degree(x), x)
    torch.manual_seed(2)
    for _ in range(3):
        direction = torch.randn_like(x)
        step = 1e-6
        with torch.no_grad():
            difference = (degree(x + step * direction) - degree(x - step * direction)) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-5, atol=1e-9)


def test_a_new_model_has_dropout(data, checkpoint):
    model, task = TextClassifier(checkpoint, classes=2), make_task(data, checkpoint)
    field = task.field(model, task.train.batch(torch.arange(8), None))
    assert not torch.equal(field(), field())


class ReadsBack(TorchDispatchMode):
    """Records operations that copy values to the host and would wait for a GPU."""

    SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.startswith(self.SYNCS):
            self.seen.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("overrides", [["none"], ["mixup"], ["ed"]])
def test_objectives_do_not_synchronise(data, checkpoint, overrides, monkeypatch):
    """Tests batches with and without padding, since some mask code checks for padding."""
    for module in ("labels", "field"):  # values are checked as on a GPU
        monkeypatch.setattr(f"ed.core.{module}.readable", lambda tensor: False)
    cfg = compose_config([f"regularizer={overrides[0]}", *overrides[1:]])
    method = instantiate(cfg.regularizer)
    task, model = make_task(data, checkpoint), TextClassifier(checkpoint, classes=2)
    state = StepState(torch.zeros(()), torch.Generator().manual_seed(0))
    for length in (None, int(task.train.lengths.min())):
        batch = task.train.batch(torch.arange(8), length)
        with ReadsBack() as host:
            loss, _ = method.objective(task, task.field(model, batch), batch, state)
            loss.backward()
        assert not host.seen
    with ReadsBack() as host:
        torch.ones(2).sum().item()
    assert host.seen, "ReadsBack misses .item()"


def test_metrics_equal_scikit_learn(data, checkpoint):
    metrics = pytest.importorskip("sklearn.metrics")
    task, model = make_task(data, checkpoint), make_model(checkpoint)
    with torch.no_grad():
        field = task.field(model, task.validation.batch(torch.arange(30), None))
        first, second = field().unbind(-1)
        # makes the model predict both classes
        model.model.classifier.bias[1] += (first - second).mean()
        outputs, found = field(), task.evaluate(model)
    truth, guess = task.validation.labels, outputs.argmax(-1)
    assert 0 < guess.sum() < 30
    assert found["eval/acc"] == pytest.approx(100 * metrics.accuracy_score(truth, guess), abs=1e-4)
    correlation = metrics.matthews_corrcoef(truth, guess)
    assert found["eval/matthews"] == pytest.approx(100 * correlation, abs=1e-9)
    loss = metrics.log_loss(truth, outputs.softmax(-1))
    assert found["eval/loss"] == pytest.approx(loss, abs=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(20):
        predictions, labels = rng.integers(0, 2, (2, 50))
        ours = matthews(torch.tensor(predictions), torch.tensor(labels))
        assert ours == pytest.approx(metrics.matthews_corrcoef(labels, predictions), abs=1e-12)
    assert matthews(torch.zeros(5), torch.tensor([0, 1, 0, 1, 1])) == 0


def test_number_of_steps_and_metric_of_each_data_set(data, checkpoint):
    task = make_task(data, checkpoint, epochs=3, warmup_epochs=1.4, eval_every=2)
    assert (task.num_examples, task.steps_per_epoch, task.total_steps) == (40, 5, 15)
    assert (task.warmup_steps, task.eval_steps) == (7, 10)
    configs = (compose_config(["task=glue", f"task.name={name}"]) for name in COLUMNS)
    metrics = [instantiate(cfg.task, tokenizer=checkpoint).metric for cfg in configs]
    assert metrics == ["eval/acc", "eval/acc", "eval/matthews"]  # RTE, MRPC, CoLA


def tiny_run(folder, data, *overrides):
    settings = ["task=glue", f"task.data={data}", "task.name=cola", "task.batch_size=8"]
    settings += ["task.epochs=1", "task.max_length=24", "optimizer.schedule=linear"]
    settings += ["system.device=cpu", "system.log_every=1", f"system.run_dir={folder}", *overrides]
    return run(compose_config(settings), ["glue"])


@pytest.mark.parametrize("regularizer", ["none", "mixup", "ed"])
@pytest.mark.parametrize("padding", ["fixed", "dynamic"])
def test_every_method_trains(data, checkpoint, regularizer, padding, tmp_path):
    overrides = [f"task.padding={padding}", f"regularizer={regularizer}", "model=bert_base"]
    summary = tiny_run(tmp_path, data, f"model.checkpoint={checkpoint}", *overrides)
    assert summary["steps"] == 5
    assert {"eval/acc", "eval/matthews", "eval/loss"} <= set(summary["last"])
    assert set(summary["best"]) == {"eval/matthews"}


def test_interrupted_equals_uninterrupted_after_moving_the_model(
    data, checkpoint, tmp_path, monkeypatch
):
    """The run uses dropout and ED; the pretrained model is moved before resuming."""
    settings = [data, "model=minilm_l6", "regularizer=ed"]
    name = "sentence-transformers/all-MiniLM-L6-v2"
    for place in ("here", "there"):
        (tmp_path / place / name).parent.mkdir(parents=True)
        (tmp_path / place / name).symlink_to(checkpoint)
    monkeypatch.setenv("ED_CHECKPOINTS", str(tmp_path / "here"))
    tiny_run(tmp_path / "whole", *settings)
    with pytest.raises(Interrupted):
        tiny_run(tmp_path / "cut", *settings, "system.max_minutes=0")
    monkeypatch.setenv("ED_CHECKPOINTS", str(tmp_path / "there"))
    tiny_run(tmp_path / "cut", *settings)
    whole, cut = (weights(tmp_path / name) for name in ("whole", "cut"))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    assert load_checkpoint(tmp_path / "cut")["step"] == 5


def test_measures_do_not_depend_on_padding(data, tmp_path):
    measures = ["measures=[ed,sharpness,norm,gap]", "measures.ed.pairs=5", "measures.ed.degree=4"]
    measures += ["measures.ed.resolution=6", "measures.sharpness.batch_size=7", "task.name=rte"]
    # large weights, since the ED of a nearly constant network is lost in float32 rounding
    checkpoint = write_checkpoint(tmp_path, initializer_range=0.3)
    model = ["model=bert_base", f"model.checkpoint={checkpoint}", "regularizer=none"]
    found = []
    for padding in ("fixed", "dynamic"):
        settings = [*model, *measures, f"task.padding={padding}", "optimizer.lr=1e-9"]
        found.append(tiny_run(tmp_path / padding, data, *settings)["last"])
    names = ["ed", "ed_se", "sharpness_0.05", "norm", "gap", "gap_train"]
    fixed, dynamic = ([each[f"measure/{name}"] for name in names] for each in found)
    assert fixed == pytest.approx(dynamic, rel=1e-3, abs=1e-5)
    assert fixed[0] > 0
    assert fixed[2] > 0


@pytest.mark.parametrize(
    ("name", "train", "validation"),
    [("rte", 2490, 277), ("mrpc", 3668, 408), ("cola", 8551, 1043)],
)
def test_real_data_sets_have_the_published_sizes(full_data, name, train, validation):
    folder = str(full_data / "glue")
    assert len(load_split(folder, name, "train")) == train
    assert len(load_split(folder, name, "validation")) == validation
