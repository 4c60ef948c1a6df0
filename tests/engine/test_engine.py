"""Schedules, optimizers, metrics, random streams and training steps."""

import copy
import errno
import functools
import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ed.datasets.batches import shuffled_batches
from ed.engine import main
from ed.engine.compose import compose_config, flat_keys
from ed.engine.main import check_steps
from ed.engine.metrics import Metrics, TerminalHandler, brief
from ed.engine.optimizer import SGD, AdamW
from ed.engine.run import resolved
from ed.engine.step import TrainStep
from ed.regularizers.base import Regularizer, StepState
from ed.runtime.runs import digest
from ed.runtime.streams import stream_seed
from ed.tasks.cifar10 import Cifar10
from tests.helpers.small import small_run
from tests.helpers.toy import Toy


def test_warmup_then_cosine_to_zero():
    factors = [AdamW(lr=1.0).lr_at(s, 100, 10) for s in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (s + 1) for s in range(10)])
    assert factors[10] == 1
    assert factors[55] == pytest.approx(0.5)
    assert factors[-1] == pytest.approx((1 + math.cos(math.pi * 89 / 90)) / 2)


@pytest.mark.parametrize(
    ("total", "every", "name"),
    [(-5, 5, "total_steps"), (9, 0, "eval_steps"), (9.5, 10, "total_steps")],
)
def test_step_counts_of_tasks_are_checked(total, every, name):
    task = Toy()
    task.total_steps, task.eval_steps = total, every
    with pytest.raises(ValueError, match=f"^Toy.{name}={min(total, every)}: "):
        check_steps(task)
    task.total_steps = task.eval_steps = 0  # nothing to train
    check_steps(task)
    assert not task.evaluation_steps()


def test_other_schedules():
    def at(step, schedule, warmup=0):
        recipe = SGD(lr=1.0, schedule=schedule, milestones=(0.25, 0.5, 0.75))
        return recipe.lr_at(step, 200, warmup)

    steps = [at(s, "multistep") for s in (49, 50, 100, 199)]
    assert steps == pytest.approx([1, 0.1, 0.01, 0.001])
    assert at(150, "linear") == pytest.approx(0.25)
    assert at(150, "linear", warmup=100) == pytest.approx(0.5)
    assert at(150, "constant") == 1


def test_optimizers_receive_their_settings():
    cpu, weight = torch.device("cpu"), torch.nn.Parameter(torch.ones(2, 2))

    def defaults(recipe):
        return recipe.build([("weight", weight)], cpu).defaults

    settings = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.5, 0.6), "eps": 0.01}
    assert settings.items() <= defaults(AdamW(**settings)).items()
    settings = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.7, "nesterov": True}
    assert settings.items() <= defaults(SGD(**settings)).items()
    falling = {"schedule": "multistep", "milestones": (0.5,), "gamma": 0.3}
    recipe = SGD(lr=0.1, weight_decay=0, **falling)
    assert recipe.lr_at(60, 100, 10) == pytest.approx(0.1 * 0.3)
    assert recipe.lr_at(4, 100, 10) == pytest.approx(0.1 * 0.5)


@pytest.mark.parametrize(("higher_is_better", "best"), [(True, 5.0), (False, 1.0)])
def test_summary_has_last_and_best_values(higher_is_better, best, tmp_path):
    metrics = Metrics(tmp_path, total=4, start=0)
    for step, value in enumerate((3.0, 5.0, 1.0, 2.0), start=1):
        metrics.log(step, {"train/loss": -value})
        metrics.log(step, {"eval/mse": value, "eval/loss": 2 * value})
    metrics.close()
    summary = metrics.summary("eval/mse", higher_is_better)
    assert summary == {"last": {"eval/mse": 2.0, "eval/loss": 4.0}, "best": {"eval/mse": best}}


def test_pace_and_eta_use_steps_of_the_current_session(tmp_path, monkeypatch):
    clock = iter((0.0, 20.0, 20.0))
    monkeypatch.setattr("ed.engine.metrics.time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = Metrics(tmp_path, total=110, start=10)
    metrics.close()
    assert metrics.pace(20) == 2.0
    assert metrics.eta(20) == "0:03:00"  # 90 steps left


def test_the_pace_leaves_out_the_first_steps(tmp_path, monkeypatch):
    """The first ten steps take a minute, e.g. to compile; later ones take a second each."""
    now = 0.0
    monkeypatch.setattr("ed.engine.metrics.time", SimpleNamespace(monotonic=lambda: now))
    metrics = Metrics(tmp_path, total=100, start=0)
    found = []
    for step in range(10, 60, 10):
        now += 60 if step == 10 else 10
        found.append(metrics.pace(step))
        metrics.log(step, {"train/loss": 1.0})
        metrics.log(step, {"eval/acc": 1.0})  # no second mark
    metrics.close()
    assert found == [6.0, 3.5, 1.0, 1.0, 1.0]
    assert metrics.eta(50) == "0:00:50"


def test_brief_shows_the_number_of_omitted_values():
    assert brief({"a": 1, "b": 0.123456}) == "a 1  b 0.1235"
    assert brief(dict.fromkeys("abcdefghijklmn", 1)).endswith("l 1  and 2 more")


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ENOSPC])
def test_output_that_cannot_be_written_is_skipped_quietly(code, capsys):
    """For example, `train.py | head -1` must not print a traceback for every log line."""

    def refuse(_):
        raise OSError(code, "cannot write")

    handler = TerminalHandler(SimpleNamespace(write=refuse))
    handler.handle(logging.makeLogRecord({"msg": "step 1/2"}))
    assert capsys.readouterr().err == ""


def test_streams_depend_on_seed_name_and_counter():
    seeds = {
        stream_seed(seed, name, counter)
        for seed in range(20)
        for name in ("init", "order", "regularizer")
        for counter in range(20)
    }
    assert len(seeds) == 20 * 3 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_batches_do_not_depend_on_the_first_step():
    """Each epoch has three batches of three out of ten examples, in a new order."""

    def indices(start):
        steps = shuffled_batches(10, 3, range(start, 9), seed=1, device="cpu")
        return {step: index.tolist() for step, index in steps}

    whole = indices(0)
    assert list(whole) == list(range(9))
    for start in range(9):
        assert indices(start) == {step: whole[step] for step in range(start, 9)}
    epochs = torch.tensor(list(whole.values())).view(3, 9)
    assert [len(epoch.unique()) for epoch in epochs] == [9, 9, 9]
    assert len(epochs.unique(dim=0)) == 3


def test_seed_determines_weights_batches_dropout_and_regularizer(tmp_path, monkeypatch):
    seen = []

    def note(folder, task, model, step, measures):
        drawn = torch.rand(()).item()  # uses the same stream as dropout
        batch = next(iter(task.batches(model, 0)))
        weights = sum(weight.sum().item() for weight in model.parameters())
        seen.append((weights, drawn, batch["x"].sum().item(), step.seed))
        raise InterruptedError

    monkeypatch.setattr("ed.engine.main.train_in", note)
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        with pytest.raises(InterruptedError):
            small_run(tmp_path / name, f"seed={seed}")
    first, again, other = seen
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize(("shape", "middle"), [("sine", math.sin(math.pi / 4)), ("cosine", 0.5)])
def test_ramp_rises_from_zero_to_one(shape, middle):
    overrides = ["regularizer=ed", f"regularizer.ramp_shape={shape}", "regularizer.ramp=0.5"]
    regularizer = instantiate(compose_config(overrides).regularizer)
    strengths = [regularizer.strength(torch.tensor(p)).item() for p in (0.0, 0.25, 0.5, 0.9)]
    assert strengths == pytest.approx([0, middle, 1, 1])


def test_without_a_ramp_weight_is_constant():
    regularizer = instantiate(compose_config(["regularizer=ed", "regularizer.ramp=0"]).regularizer)
    assert regularizer.strength(torch.tensor(0.0)).item() == 1


def make_step(*overrides: str, model=None, **how) -> TrainStep:
    cfg = compose_config(["debug=tiny", "task.batch_size=40", *overrides])
    torch.manual_seed(0)
    task, model = instantiate(cfg.task), model or instantiate(cfg.model)
    task.prepare(torch.device("cpu"), seed=0)
    regularizer, recipe = instantiate(cfg.regularizer), instantiate(cfg.optimizer)
    return TrainStep(task, model, regularizer, recipe, device=torch.device("cpu"), seed=0, **how)


def test_gpu_checkpoint_loads_with_cpu_optimizer_options():
    """On a GPU, the optimizer is fused and its learning rate is a tensor."""
    ours, theirs = (make_step("model.depth=1") for _ in range(2))
    batch = next(iter(theirs.task.batches(theirs.model, 0)))
    theirs(batch, 0)
    stored = copy.deepcopy(theirs.state_dict())
    stored["optimizer"]["param_groups"][0] |= {"fused": True, "lr": torch.tensor(0.5)}
    ours.load_state_dict(stored)
    (group,) = ours.optimizer.param_groups
    assert group["fused"] is None
    assert not isinstance(group["lr"], torch.Tensor)
    for step in (ours, theirs):
        step(batch, 1)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_make_step_forwards_settings(monkeypatch):
    monkeypatch.setattr(main, "TrainStep", lambda *_, **how: how)
    cfg = compose_config(
        ["seed=3", "accumulate=2", "precision=bf16", "system.activation_checkpointing=true"]
    )
    cpu = torch.device("cpu")
    how = main.make_step(cfg, instantiate(cfg.task), torch.nn.Linear(2, 2), None, None, cpu)
    fast = dict.fromkeys(("bf16", "compile_model", "kernels", "capture"), False)  # GPU only
    assert how == {"device": cpu, "seed": 3, "accumulate": 2, "recompute": True, **fast}


def test_path_points_do_not_affect_batch_norm_statistics():
    """The statistics after an ED step and a plain step are bitwise identical."""
    statistics = {}
    for name in ("none", "ed"):
        step = make_step("model=resnet18", "task.batch_size=8", f"regularizer={name}")
        step(next(iter(step.task.batches(step.model, 0))), 0)
        statistics[name] = {k: v for k, v in step.model.state_dict().items() if "running" in k}
    for key, value in statistics["none"].items():
        assert torch.equal(value, statistics["ed"][key]), key


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_step_gives_the_same_losses(backend, monkeypatch):
    """Inductor takes half a minute and needs a C++ compiler, so it is marked as slow."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    eager, compiled = (make_step("model.depth=1", compile_model=c) for c in (False, True))
    for number, batch in zip(range(2), eager.task.batches(eager.model, 0), strict=False):
        eager(batch, number)
        compiled(batch, number)
    assert compiled.means()["train/loss"] == pytest.approx(eager.means()["train/loss"], rel=1e-4)


def convolutional() -> torch.nn.Module:
    torch.manual_seed(0)
    first, second = (torch.nn.Conv2d(*c, 3, stride=2, padding=1) for c in ((3, 8), (8, 4)))
    return torch.nn.Sequential(
        first, torch.nn.ReLU(), second, torch.nn.Flatten(), torch.nn.Linear(4 * 8 * 8, 10)
    )


def test_memory_format_does_not_change_results():
    """The format may also change during a run, as when a CPU run resumes on a GPU."""
    settings = ["optimizer=sgd", "optimizer.lr=0.1"]
    plain, last, resumed = (make_step(*settings, model=convolutional()) for _ in range(3))
    last.model.to(memory_format=torch.channels_last)
    for number, batch in zip(range(5), plain.task.batches(plain.model, 0), strict=False):
        if number == 3:
            resumed.model.to(memory_format=torch.channels_last)
            resumed.load_state_dict(copy.deepcopy(plain.state_dict()))
        for step in (plain, last, *([resumed] if number >= 3 else [])):
            step(batch, number)
    for step in (last, resumed):
        torch.testing.assert_close(step.model.state_dict(), plain.model.state_dict())
        for weight, state in step.optimizer.state.items():
            assert state["momentum_buffer"].stride() == weight.stride()
        features = step.model[:3](batch["x"])  # the batch is contiguous
        assert features.is_contiguous(memory_format=torch.channels_last)


def test_clipping_bounds_the_gradient():
    step = make_step("optimizer.max_grad_norm=1e-3")
    step(next(iter(step.task.batches(step.model, 0))), 0)
    norm = torch.nn.utils.get_total_norm([p.grad for p in step.model.parameters()])
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_pairs_are_divided_among_parts_of_a_batch():
    regularizer = instantiate(
        compose_config(["regularizer=ed", "regularizer.pairs=64"]).regularizer
    )
    assert regularizer._pairs(100, parts=1) == 64
    assert regularizer._pairs(50, parts=2) == 32
    regularizer.pairs = None
    assert regularizer._pairs(50, parts=2) == 25  # by default, half the examples in the part
    assert StepState(torch.tensor(0.0), torch.Generator()).parts == 1


def test_config_has_few_keys():
    """Newcomers can still read through about seventy keys; think twice before adding one."""
    config = OmegaConf.to_container(compose_config(["regularizer=ed"]))
    keys = [key for key in flat_keys(config) if "_target_" not in key]
    assert len(keys) <= 77, keys


def test_batches_that_end_early_raise(tmp_path, monkeypatch):
    whole = Cifar10.batches
    monkeypatch.setattr(
        Cifar10,
        "batches",
        lambda *given: (b for b, _ in zip(whole(*given), range(3), strict=False)),
    )
    with pytest.raises(ValueError, match=r"Cifar10\.batches.* 3 of total_steps=10"):
        small_run(tmp_path)
    assert not (tmp_path / "DONE").exists()


def test_evaluations_may_return_tensors(tmp_path, monkeypatch, capsys):
    """Values are stored as JSON, which has no tensors; a missing main metric is reported."""
    monkeypatch.setattr(Cifar10, "evaluate", lambda *_: {"eval/own": torch.tensor(3.0)})
    assert small_run(tmp_path)["last"]["eval/own"] == 3
    assert (
        "Cifar10.evaluate never returned its metric eval/acc: eval/own" in capsys.readouterr().out
    )


def test_summary_ignores_measures_of_earlier_steps_and_sessions(tmp_path):
    rows = [{"step": 5, "eval/acc": 1.0, "measure/norm": 3.0}, {"step": 10, "measure/gap": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = Metrics(tmp_path, total=10, start=10)
    assert metrics.summary("eval/acc", True)["last"] == {"eval/acc": 1.0}
    metrics.close()


def test_digest_depends_only_on_settings_that_change_the_result():
    def known(*overrides: str) -> str:
        return digest(resolved(compose_config(list(overrides))))

    assert known("regularizer=ed", "regularizer.weight=7") == known("regularizer=ed")
    assert known("regularizer=ed", "regularizer.weight=8") != known("regularizer=ed")
    assert known("regularizer=ed", "sampler=uniform") != known("regularizer=ed")
    assert known("regularizer=none", "sampler=uniform") == known("regularizer=none")


def test_model_without_biases_has_one_parameter_group():
    model = torch.nn.Linear(8, 3, bias=False)
    recipe = AdamW(lr=0.1, weight_decay=0.1, decay="matrices")
    optimizer = recipe.build(model.named_parameters(), torch.device("cpu"))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]


def test_compiled_runs_of_one_process_do_not_share_compiled_code(tmp_path, monkeypatch):
    """After eight versions of a function, torch would stop compiling it, e.g. in a sweep."""
    calls = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(Regularizer, "compile", lambda self, model: calls.append("compile"))
    for seed in range(2):
        small_run(tmp_path / str(seed), f"seed={seed}", "system.compile=true")
    assert calls == ["reset", "compile"] * 2
