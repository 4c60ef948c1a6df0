"""Each regularizer against its defining identity, and all of them in the same training step."""

import copy
import functools
import math

import pytest
import torch
from hydra.utils import instantiate
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ed.core import processes
from ed.core.field import Field
from ed.core.nodes import ChebyshevNodes, RandomizedCosine, UniformNodes
from ed.core.representation import Representation
from ed.engine.compose import compose_config
from ed.engine.optimizer import SGD, AdamW
from ed.engine.step import TrainStep
from ed.models.vit import ViT
from ed.regularizers.base import Moment, Regularizer
from ed.regularizers.jacobian import Jacobian, aligned_attention, plain_attention, sphere
from ed.regularizers.mixup import Mixup
from ed.regularizers.sam import Asam, Sam
from ed.tasks.base import Task

CLASSES, BATCH = 3, 8
CPU = torch.device("cpu")
METHODS = {  # config leaf: overrides that make it small
    "none": [],
    "mixup": [],
    "sam": [],
    "asam": [],
    "jacobian": ["regularizer.projections=2"],
    "ed": [],
    "ed_performance": ["regularizer.pairs=4"],
}


class Toy(Task):
    """Random pictures with random labels."""

    batch_size, total_steps = BATCH, 10
    has_labels = has_noise = True

    def batches(self, model, start, dtype=torch.float64):
        for step in range(start, self.total_steps):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, 3, 8, 8, generator=draw, dtype=dtype)
            yield {"x": x, "label": torch.randint(CLASSES, (BATCH,), generator=draw)}

    def field(self, model, batch):
        return Field.of(model, batch["x"])

    def loss(self, outputs, batch):
        loss = F.cross_entropy(outputs, batch["label"])
        accuracy = (outputs.argmax(-1) == batch["label"]).double().mean()
        return loss, {"loss": loss.detach(), "acc": 100 * accuracy}

    def noise_like(self, x, generator):
        return torch.rand(x.shape, generator=generator, dtype=x.dtype)


def vit(dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    size = {"image_size": [8, 8], "patch": 4, "width": 16, "depth": 2, "heads": 2}
    model = ViT(classes=CLASSES, **size, pool="token", dropout=0.0, activation="gelu")
    return model.to(dtype)


def convolution() -> nn.Module:
    """With batch norm."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, CLASSES)).double()


@functools.cache
def config(name: str):
    return compose_config([f"regularizer={name}", *METHODS[name]]).regularizer


def training(regularizer, model, *, recipe=None, **how) -> TrainStep:
    recipe = recipe or SGD(lr=0.1, weight_decay=0.0, schedule="constant")
    return TrainStep(Toy(), model, regularizer, recipe, device=CPU, seed=0, **how)


def run(step: TrainStep, start: int, stop: int, dtype=torch.float64) -> TrainStep:
    batches = Toy().batches(step.model, start, dtype)
    for number, batch in zip(range(start, stop), batches, strict=False):
        step(batch, number)
    return step


def moment(seed: int = 0) -> Moment:
    return Moment(torch.tensor(0.5), torch.Generator().manual_seed(seed))


def first_batch() -> dict:
    return next(Toy().batches(None, 0))


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


# --- SAM and ASAM


@pytest.mark.parametrize(
    "method", [Sam(0.0), Asam(0.0, eta=0.01, scope="weights"), Asam(0.0, eta=0.0, scope="all")]
)
@pytest.mark.parametrize("recipe", [SGD, AdamW])
def test_zero_radius_is_the_plain_step(method, recipe):
    recipe = recipe(lr=0.01, weight_decay=0.1)
    plain = run(training(Regularizer(), vit(), recipe=recipe), 0, 3)
    aware = run(training(method, vit(), recipe=recipe), 0, 3)
    assert_same_weights(aware.model, plain.model)  # w + 0 is w: not even rounding differs


class Quadratic(nn.Module):
    """L = theta' A theta / 2 with theta = (weight, bias), so the gradient is A theta."""

    A = torch.tensor([[3.0, 1.0, 0.5], [1.0, 2.0, -0.4], [0.5, -0.4, 1.5]], dtype=torch.float64)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.7, -1.2], dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor([0.4], dtype=torch.float64))

    def theta(self):
        return torch.cat([self.weight, self.bias])

    def forward(self):
        return self.theta() @ self.A @ self.theta() / 2


@pytest.mark.parametrize(
    ("method", "scale"),
    [
        (Sam(0.3), [1, 1, 1]),
        (Asam(0.3, eta=0.05, scope="weights"), [0.7 + 0.05, 1.2 + 0.05, 1]),
        (Asam(0.3, eta=0.05, scope="all"), [0.7, 1.2, 0.4]),
    ],
    ids=["sam", "asam-weights", "asam-all"],
)
def test_step_on_a_quadratic_equals_the_formula(method, scale):
    model, learning_rate = Quadratic(), 0.1
    optimizer = torch.optim.SGD(model.named_parameters(), lr=learning_rate)
    theta, scale = model.theta().detach(), torch.tensor(scale, dtype=torch.float64)
    gradient = model.A @ theta
    perturbation = 0.3 * scale**2 * gradient / torch.linalg.vector_norm(scale * gradient)
    expected = theta - learning_rate * model.A @ (theta + perturbation)

    passes = []

    def closure(sync=True, update_statistics=True):
        passes.append((sync, update_statistics))
        optimizer.zero_grad()
        model().backward()
        return {}

    method.step(optimizer, closure)
    # each process climbs by its own examples, and all descend together
    assert passes == [(False, True), (True, False)]
    # a dozen float64 operations on numbers near 1; TINY beside a norm near 3 is below rounding x 10
    torch.testing.assert_close(model.theta().detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [Sam(0.5), Asam(0.5, eta=0.01, scope="weights")])
def test_clipping_leaves_the_ascent_alone(method):
    model = Quadratic()
    model().backward()
    named = dict(model.named_parameters())
    with torch.no_grad():
        free = method.ascent(named)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped = method.ascent(named)
    torch.testing.assert_close(clipped, free, rtol=1e-9, atol=0)  # TINY beside a norm of 0.01


def test_perturbed_weights_come_back_exactly():
    model = vit()
    before = copy.deepcopy(model)
    still = SGD(lr=1e-300, weight_decay=0.0)  # too small to move a float64 weight
    run(training(Sam(0.7), model, recipe=still), 0, 1)
    for (name, now), then in zip(model.named_parameters(), before.parameters(), strict=True):
        # zero-initialised weights do move, by 1e-300; `w + e - e` misses by 1e-17
        torch.testing.assert_close(now, then, rtol=0, atol=1e-200, msg=name)


def test_second_pass_sees_the_perturbed_weights_under_autocast():
    """Autocast keeps bf16 copies of the weights; they must not outlive the first pass."""
    gradients = []
    for radius in (0.0, 1.0):
        step = training(Sam(radius), vit(torch.float32), bf16=True)
        run(step, 0, 1, torch.float32)
        gradients.append(step.model.head.weight.grad)
    change = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert change > 0.1  # bf16 rounds at 0.004; the same weights would give exactly 0


def test_sam_updates_batch_norm_statistics_once_at_the_unperturbed_weights():
    model = convolution()
    reference = copy.deepcopy(model)
    run(training(Sam(0.5), model), 0, 1)
    reference(first_batch()["x"])
    assert int(model[1].num_batches_tracked) == 1
    assert torch.equal(model[1].running_mean, reference[1].running_mean)
    assert torch.equal(model[1].running_var, reference[1].running_var)


def test_asam_knows_the_names_of_the_parameters_in_training():
    """Weights-only and everywhere differ in the biases' and tokens' perturbation alone."""
    seen = {}

    class Spy(Asam):
        def scale(self, name, weight):
            seen[name] = super().scale(name, weight)
            return seen[name]

    model = vit()
    run(training(Spy(0.5, eta=0.01, scope="weights"), model), 0, 1)
    assert seen.keys() == {name for name, _ in model.named_parameters()}
    plain = {name for name, scale in seen.items() if torch.equal(scale, torch.ones_like(scale))}
    assert {"cls_token", "pos_embed", "head.bias"} <= plain
    assert not any("weight" in name for name in plain)


# --- Jacobian


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES), nn.Tanh()).double()


class Operations(TorchDispatchMode):
    """Notes every operation and what it gives."""

    def __init__(self, seen: list):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append((str(func), out))
        return out


def jacobians(function, points):
    return torch.stack([torch.func.jacrev(function)(point) for point in points])  # (B, C, D)


def test_jacobian_estimate_is_exact_for_its_direction():
    model = two_layers()
    x = torch.randn(4, 5, dtype=torch.float64).requires_grad_()
    outputs = model(x)
    estimate = Jacobian(1.0, projections=1).estimate(outputs, x, moment().generator)
    v = sphere(outputs, moment().generator)
    torch.testing.assert_close(v.square().sum(-1), torch.ones(4, dtype=torch.float64))
    projected = torch.einsum("bc,bcd->bd", v, jacobians(model, x.detach()))
    torch.testing.assert_close(estimate, CLASSES * projected.square().sum() / (2 * 4))


@pytest.mark.parametrize("projections", [1, 3])
def test_jacobian_estimate_is_unbiased(projections):
    model, count = two_layers(), 20_000
    point = torch.randn(5, dtype=torch.float64)
    x = point.repeat(count, 1).requires_grad_()  # each row gets a direction of its own
    penalty = Jacobian(1.0, projections=projections)
    estimate = penalty.estimate(model(x), x, moment().generator)
    J = torch.func.jacrev(model)(point)
    M, C = J @ J.T, CLASSES
    exact = J.square().sum() / 2
    # E[(v'Mv)^2] = (2 tr M^2 + (tr M)^2) / (C (C + 2)) on the sphere gives the estimator's variance
    second = (2 * (M @ M).trace() + M.trace() ** 2) / (C * (C + 2))
    variance = C**2 / 4 * (second - M.trace() ** 2 / C**2)
    error = 5 * (variance / (count * projections)).sqrt()  # 5 sigma: fails by chance once in 1e6
    assert error < 0.05 * exact
    assert abs(estimate - exact) < error


def test_jacobian_estimate_keeps_the_precisions_of_the_forward_pass():
    """Autocast has no part in it; squares of what bf16 features give are float32."""
    model, x = two_layers().float(), torch.randn(4, 5, requires_grad=True)
    outputs, penalty = model(x), Jacobian(1.0, projections=1)
    expected = penalty.estimate(outputs, x, moment().generator)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(penalty.estimate(outputs, x, moment().generator), expected)
    features = x.detach().bfloat16().requires_grad_()
    outputs = model.bfloat16()(features).float()
    v = sphere(outputs, moment().generator)
    (projected,) = torch.autograd.grad(outputs, features, v, retain_graph=True)
    expected = CLASSES * projected.float().square().sum() / (2 * 4)
    estimate = penalty.estimate(outputs.bfloat16(), features, moment().generator)
    torch.testing.assert_close(estimate.detach(), expected)


def test_jacobian_penalty_trains_the_layers_before_an_inner_space():
    """The gradient of R with respect to all weights, the features' own included."""
    model, x = two_layers(), torch.randn(4, 5, dtype=torch.float64)
    before, after = model[:2], model[2:]

    class Silent(Toy):
        def loss(self, outputs, batch):
            return 0 * outputs.sum(), {}

    field = Field.of(after, before(x))
    loss, report = Jacobian(2.0, projections=1).objective(Silent(), field, {}, moment())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    features = before(x)
    v = sphere(after(features), moment().generator)
    projected = torch.einsum("bc,bcd->bd", v, jacobians(after, features))
    expected = 2.0 * CLASSES * projected.square().sum() / (2 * 4)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(2.0 * report["penalty"], expected.detach())
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    )


@pytest.mark.parametrize("space", ["input", "block1"])
def test_compiled_jacobian_equals_the_eager_one(space, monkeypatch):
    """Loss, penalty and gradients, traced and differentiated ahead of time as on a GPU."""
    compiler = functools.partial(torch.compile, backend="aot_eager")  # no code generation
    monkeypatch.setattr(torch, "compile", compiler)
    model, batch, found = vit(), first_batch(), []
    for compiled in (False, True):
        penalty = Jacobian(1.0, projections=2)
        if compiled:
            penalty.compile(model)
        field = Field.of(model, batch["x"])
        if space == "block1":
            features = model.to_space(batch["x"], space)
            field = Field.of(functools.partial(model.from_space, space=space), features)
        loss, report = penalty.objective(Toy(), field, batch, moment())
        found.append((report, torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(found[1], found[0])


def test_compiled_jacobian_finds_its_width_without_a_draw(monkeypatch):
    """A resumed run looks once more, and its dropout must go on where it was."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, CLASSES), nn.Tanh())
    model.double()
    penalty, batch, losses = Jacobian(1.0, projections=1), first_batch(), []
    penalty.compile(model)
    for known in (None, CLASSES):
        penalty.width = known
        torch.manual_seed(1)
        losses.append(penalty.objective(Toy(), Field.of(model, batch["x"]), batch, moment())[0])
    assert torch.equal(*losses)


def test_jacobian_of_batch_norm_is_not_compiled():
    penalty = Jacobian(1.0, projections=1)
    penalty.compile(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert penalty.pull_back is None


def test_jacobian_attends_by_products_for_tensor_cores():
    """In bf16, among 8 tokens for 5; and leaves torch's own choice of precision as it was."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    q = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    seen = []
    with plain_attention(), Operations(seen):
        out = F.scaled_dot_product_attention(q, q, q)
        (first,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
        first.float().square().sum().backward()
    products = [out for name, out in seen if name.startswith("aten.bmm")]
    assert len(products) > 6
    assert {out.dtype for out in products} == {torch.bfloat16}
    assert {size for out in products for size in out.shape[1:]} == {8}
    assert not allowed()  # torch's default
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("mask", ["none", "bool", "float", "rows", "columns", "one head's"])
def test_aligned_attention_is_attention(mask):
    """With 13 queries and 10 keys: outputs and gradients, none of them lost in the added tokens."""
    torch.manual_seed(0)
    made = [torch.randn(2, 3, count, 8, dtype=torch.float64) for count in (13, 10, 10)]
    inputs = [x.requires_grad_() for x in made]
    keep = torch.rand(2, 1, 1, 10) > 0.3
    masks = {
        "none": None,
        "bool": keep,
        "float": torch.zeros(2, 1, 1, 10, dtype=torch.float64).masked_fill(~keep, -math.inf),
        "rows": torch.rand(2, 1, 13, 10) > 0.3,
        "columns": torch.randn(2, 3, 13, 1, dtype=torch.float64),
        "one head's": torch.randn(13, 10, dtype=torch.float64),
    }
    settings = {"attn_mask": masks[mask], "dropout_p": 0.0, "scale": 0.3}
    found = []
    for attention in (F.scaled_dot_product_attention, aligned_attention):
        out = attention(*inputs, **settings)
        found.append((out, torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(found[1], found[0])


def test_aligned_attention_leaves_what_it_cannot_pad():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(aligned_attention(q, q, q, is_causal=True), expected)
    assert torch.equal(aligned_attention(q, q, q, None, 0.0, True), expected)


def test_jacobian_differentiates_attention_twice():
    """Through a ViT: the gradient of the objective matches central differences."""
    model, batch, penalty = vit(), first_batch(), Jacobian(1.0, projections=1)
    field = Field.of(model, batch["x"])

    def objective():
        return penalty.objective(Toy(), field, batch, moment())[0]

    weight = model.blocks[0].attn.qkv.weight
    (gradient,) = torch.autograd.grad(objective(), weight)
    direction = torch.randn(weight.shape, dtype=torch.float64)
    h, values = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * h)
        values.append(objective().detach())
        with torch.no_grad():
            weight.sub_(direction, alpha=sign * h)
    slope = (values[0] - values[1]) / (2 * h)
    # h^2 truncation and rounding / h both give about 1e-9
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-7)


# --- mixup


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_mixup_equals_soft_label_cross_entropy(alpha, per_example):
    model, batch = convolution(), first_batch()
    method = Mixup(alpha, per_example=per_example)
    loss, report = method.objective(Toy(), Toy().field(model, batch), batch, moment())
    draw = moment().generator
    partner = torch.randperm(BATCH, generator=draw)
    lam = method.draw(BATCH if per_example else 1, batch["x"], draw).expand(BATCH)
    assert len(lam.unique()) == (BATCH if per_example else 1)
    assert not torch.equal(partner, torch.arange(BATCH))
    picture = lam.view(-1, 1, 1, 1)
    x = picture * batch["x"] + (1 - picture) * batch["x"][partner]
    target = F.one_hot(batch["label"], CLASSES).double()
    target = lam[:, None] * target + (1 - lam)[:, None] * target[partner]
    torch.testing.assert_close(loss, F.cross_entropy(model(x), target))
    assert report.keys() == {"loss", "acc"}
    torch.testing.assert_close(report["loss"], loss.detach())


@pytest.mark.parametrize("alpha", [1.0, 0.3, 2.0])
def test_lambda_follows_the_beta_distribution(alpha):
    count = 40_000
    like = torch.zeros((), dtype=torch.float64)
    lam = Mixup(alpha, per_example=True).draw(count, like, moment().generator)
    variance = 1 / (4 * (2 * alpha + 1))
    assert lam.min() >= 0
    assert lam.max() <= 1
    assert abs(lam.mean() - 0.5) < 5 * (variance / count) ** 0.5
    # (lam - 1/2)^2 lies in [0, 1/4], so its own variance is at most 1/64
    assert abs((lam - 0.5).square().mean() - variance) < 5 * (1 / 64 / count) ** 0.5


def test_mixup_needs_labels():
    with pytest.raises(ValueError, match=r"regularizer=mixup: Task has no labels"):
        Mixup(1.0, per_example=False).check(Task())


def test_mixup_needs_two_examples_in_every_part_of_a_batch():
    """An example mixed with itself is the example: nothing would be left of mixup."""
    Mixup(1.0, per_example=False).check(Toy(), parts=BATCH // 2)
    message = (
        rf"task\.batch_size={BATCH} cut into {BATCH} parts .*: mixing needs at least 2 examples"
    )
    with pytest.raises(ValueError, match=message):
        Mixup(1.0, per_example=False).check(Toy(), parts=BATCH)


# --- effective degree


@pytest.mark.parametrize(("endpoints", "moves"), [("noise", False), ("batch", True)])
def test_random_pixel_paths_use_no_picture_of_the_batch(endpoints, moves):
    method = instantiate(config("ed"), endpoints=endpoints)
    model, batch = vit(), first_batch()

    def penalty(x):
        return method.objective(Toy(), Field.of(model, x), batch, moment())[1]["penalty"]

    one, other = penalty(batch["x"]), penalty(5 - 3 * batch["x"])
    # the batch shares the forward pass with the paths, row by row: rounding at most
    assert bool((one - other).abs() > 1e-12 * one) == moves

    x = batch["x"].clone().requires_grad_()
    total, _ = method.objective(Toy(), Field.of(model, x), batch, moment())
    plain, _ = Toy().loss(model(x), batch)
    (pull,) = torch.autograd.grad(total - plain, x)
    assert bool(pull.abs().max() > 1e-12) == moves  # gradients here are about 1e-2


@pytest.mark.parametrize(("space", "same"), [("embedding", True), ("block1", False)])
def test_paths_between_embeddings_are_those_between_pictures(space, same):
    """The embedding is affine, and weights of a path add up to 1: the class token and positions
    stay, patches blend. So it takes straight paths to straight paths; a block does not."""
    model, batch, method = vit(), first_batch(), instantiate(config("ed"))
    features = model.to_space(batch["x"], space)
    inner = Field.of(functools.partial(model.from_space, space=space), features)
    found = []
    for field in (Field.of(model, batch["x"]), inner):
        loss, _ = method.objective(Toy(), field, batch, moment())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach(), *gradients])
    gaps = [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]
    assert (max(gaps) < 1e-10) == same  # float64 rounding, of gradients up to 1


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.0), (0.25, 0.5), (1.0, 1.0)])
def test_lambda_rises_over_its_ramp(progress, share):
    method = instantiate(config("ed"), weight=3.0, ramp=0.5, ramp_shape="cosine")
    batch, when = first_batch(), Moment(torch.tensor(progress), torch.Generator().manual_seed(0))
    total, report = method.objective(Toy(), Field.of(vit(), batch["x"]), batch, when)
    torch.testing.assert_close(
        total.detach(), report["loss"] + 3.0 * share * report["penalty"], rtol=1e-6, atol=0
    )


def test_a_penalty_has_the_settings_that_it_is_given():
    settings = {
        "resolution": 9, "degree": 4, "basis": "legendre", "components": 2,
        "weighting": "quadratic", "damping": 0.1, "detach_pca": True,
    }  # fmt: skip
    method = instantiate(config("ed"), **settings)
    assert method.representation == Representation(**settings)


def test_efficiency_configuration_is_the_papers():
    method = instantiate(config("ed"))
    paper = {"resolution": 4, "degree": 3, "sampler": RandomizedCosine(), "damping": 1e-6}
    assert method.representation == Representation(**paper) == Representation()
    assert (method.weight, method.pairs, method.anchored) == (7.0, None, True)
    assert (method.ramp, method.ramp_shape) == (pytest.approx(1 / 3), "sine")


def test_performance_configuration_brings_its_fixed_nodes():
    method = instantiate(compose_config(["regularizer=ed_performance"]).regularizer)
    assert method.representation.sampler == ChebyshevNodes()
    assert (method.representation.resolution, method.representation.degree) == (15, 7)
    assert (method.weight, method.pairs, method.anchored) == (2.0, 256, True)


@pytest.mark.parametrize("leaf", ["ed", "ed_performance"])
def test_nodes_on_the_command_line_are_those_that_train(leaf):
    method = instantiate(compose_config([f"regularizer={leaf}", "sampler=uniform"]).regularizer)
    assert method.representation.sampler == UniformNodes()


# --- all of them in one training step


@pytest.mark.parametrize(
    ("name", "compiled"), [("ed", False), ("jacobian", False), ("jacobian", True)]
)
def test_penalties_see_only_the_outputs_that_a_task_names(name, compiled, monkeypatch):
    """The last output is no logit, like PPO's value: ten times as large, it changes nothing."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    class Named(Toy):
        penalised = slice(0, 2)

    batch, model, penalties = first_batch(), two_layers(), []
    points = batch["x"].flatten(1)[:, :5]
    for factor in (1, 10):
        changes = {"anchored": False} if name == "ed" else {}
        method = instantiate(config(name), **changes)
        if compiled:
            method.compile(model)
        size = torch.tensor([1, 1, factor], dtype=torch.float64)
        field = Field.of(lambda x, size=size: size * model(x), points)
        penalties.append(method.objective(Named(), field, batch, moment())[1]["penalty"])
    assert torch.equal(*penalties)
    if compiled:
        eager = instantiate(config(name)).objective(Named(), field, batch, moment())[1]["penalty"]
        torch.testing.assert_close(penalties[1], eager)


class Spy(Regularizer):
    """Plain training that notes what it is given."""

    def __init__(self):
        self.seen, self.losses = [], []

    def objective(self, task, field, batch, moment):
        draw = torch.rand((), generator=moment.generator).item()
        self.seen.append((draw, moment.parts, len(field.x), moment.progress.item()))
        loss, report = super().objective(task, field, batch, moment)
        self.losses.append(loss.item())
        return loss, report


def test_each_process_draws_for_itself_and_knows_the_parts_of_a_step(monkeypatch):
    spies = {None: Spy(), 0: Spy(), 1: Spy()}
    run(training(spies[None], vit()), 0, 1)
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    monkeypatch.setattr(processes, "mean", list)  # there is no other to ask
    for rank in (0, 1):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        run(training(spies[rank], vit(), accumulate=2), 0, 1)
    draws, parts, sizes, _ = zip(*spies[0].seen, *spies[1].seen, strict=True)
    assert len(set(draws)) == 4
    assert draws[0] == spies[None].seen[0][0]  # the first as if it were alone
    assert set(parts) == {4}
    assert set(sizes) == {BATCH // 4}


def test_every_step_of_every_seed_draws_anew():
    spies = []
    for seed in (0, 1):
        spies.append(Spy())
        step = training(spies[-1], vit())
        step.seed = seed
        run(step, 0, 4)
    assert len({draw for spy in spies for draw, *_ in spy.seen}) == 8


def test_a_row_has_the_mean_of_all_parts_of_the_steps_since_the_last():
    spy = Spy()
    step = run(training(spy, vit(), accumulate=2), 0, 3)
    assert step.means()["train/loss"] == pytest.approx(sum(spy.losses) / 6)
    run(step, 3, 5)
    assert step.means()["train/loss"] == pytest.approx(sum(spy.losses[6:]) / 4)


def test_rate_and_progress_follow_the_step_and_the_tasks_warm_up():
    spy, recipe = Spy(), AdamW(lr=0.1, weight_decay=0.0, decay="matrices")  # two groups
    step = training(spy, vit(), recipe=recipe)
    step.task.warmup_steps = 4
    rates = []
    for number, batch in zip((0, 1, 7), Toy().batches(None, 0), strict=False):
        step(batch, number)
        rates.append([group["lr"] for group in step.optimizer.param_groups])
    cosine = (1 + math.cos(math.pi * 3 / 6)) / 2
    for group in zip(*rates, strict=True):
        assert group == pytest.approx([0.1 / 4, 0.2 / 4, 0.1 * cosine])
    assert [progress for *_, progress in spy.seen] == pytest.approx([0, 0.1, 0.7])


def test_accumulation_leaves_the_gradient_alone():
    whole = run(training(Regularizer(), vit()), 0, 1).model
    parts = run(training(Regularizer(), vit(), accumulate=2), 0, 1).model
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)  # order of sums


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_under_accumulation_and_clipping(name, bf16):
    recipe = AdamW(lr=0.01, weight_decay=0.1, clip=0.1)
    model, before = vit(torch.float32), vit(torch.float32)
    step = training(instantiate(config(name)), model, recipe=recipe, accumulate=2, bf16=bf16)
    run(step, 0, 2, torch.float32)
    values = step.means()
    assert values.keys() >= {"train/loss", "train/acc"}
    assert all(torch.tensor(value).isfinite() for value in values.values())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert norm <= 0.1 * (1 + 1e-4)  # what the optimizer saw was clipped; float32 rounding
    for (key, now), then in zip(model.named_parameters(), before.parameters(), strict=True):
        assert now.isfinite().all(), key
        assert not torch.equal(now, then), key


@pytest.mark.parametrize("name", METHODS)
def test_resumed_training_is_bitwise_the_same(name):
    recipe = AdamW(lr=0.01, weight_decay=0.1)
    whole = run(training(instantiate(config(name)), vit(), recipe=recipe), 0, 4)
    first = run(training(instantiate(config(name)), vit(), recipe=recipe), 0, 2)
    again = training(instantiate(config(name)), vit(), recipe=recipe)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    run(again, 2, 4)
    assert_same_weights(again.model, whole.model)
    assert again.peek() == whole.peek()


@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_sees_each_example_once(name):
    """Paths, projections and perturbed weights leave the running statistics alone."""
    model = convolution()
    run(training(instantiate(config(name)), model), 0, 1)
    assert int(model[1].num_batches_tracked) == 1
    if name != "mixup":  # it replaces the batch
        reference = convolution()
        reference(first_batch()["x"])
        assert torch.equal(model[1].running_mean, reference[1].running_mean)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixup(0.0, per_example=False), r"regularizer.alpha=0.0"),
        (lambda: Sam(-1.0), r"regularizer.rho=-1.0"),
        (lambda: Asam(0.5, eta=-1.0, scope="all"), r"regularizer.eta=-1.0"),
        (lambda: Asam(0.5, eta=0.0, scope="bias"), r"regularizer.scope=bias: use weights or all"),
        (lambda: Jacobian(-0.1, projections=1), r"regularizer.weight=-0.1"),
        (lambda: Jacobian(0.1, projections=0), r"regularizer.projections=0"),
        (lambda: Jacobian(0.1, projections=1.5), r"regularizer.projections=1.5: must be a whole"),
        (lambda: SGD(lr=0.1, weight_decay=0, momentum=1), r"optimizer.momentum=1: must lie in"),
        (
            lambda: SGD(lr=0.1, weight_decay=0, momentum=0, nesterov=True),
            r"optimizer.nesterov=true: needs a positive optimizer.momentum",
        ),
    ],
)
def test_impossible_settings_name_their_key(make, message):
    with pytest.raises(ValueError, match=message):
        make()
