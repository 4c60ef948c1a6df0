"""Networks, inputs and regularizers for the benchmarks, at full size and for a CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ed
from ed.core.field import Field
from ed.models.impala import Impala
from ed.models.resnet import cifar_resnet18
from ed.models.vit import ViT
from ed.regularizers.base import Regularizer
from ed.regularizers.ed import EDRegularizer
from ed.regularizers.jacobian import Jacobian
from ed.regularizers.mixup import Mixup
from ed.regularizers.sam import Asam, Sam
from ed.tasks.base import Batch, Task

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@dataclass(frozen=True)
class Case:
    """A network, its batch size and the methods to time.

    Attributes:
        build: builds the model; inputs: builds a batch of n inputs.
        extra: inputs that ED adds to a batch.
        epoch: examples in an epoch, to report seconds per epoch.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    batch: int
    pairs: int
    components: int | None = None
    anchored: bool = True
    value_head: bool = False
    bf16: bool = True
    epoch: int | None = None
    rivals: tuple[str, ...] = ()

    @property
    def extra(self) -> int:
        return self.pairs * (2 if self.anchored else 4)


class Synthetic(Task):
    """A task with random inputs and labels, to time a step."""

    total_steps = 10**6

    def __init__(self, case: Case, batch_size: int):
        self.case, self.batch_size = case, batch_size
        self.has_labels = case.anchored  # Procgen's labels are actions
        self.penalised = slice(case.classes)
        labels = torch.randint(case.classes, (batch_size,), device=DEVICE)
        self.batch = {"x": case.inputs(batch_size), "label": labels}

    def field(self, model: nn.Module, batch: Batch) -> Field:
        x = model.embed(batch["x"]) if hasattr(model, "embed") else batch["x"]
        return Field.of(model, x)

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(outputs[:, self.penalised].float(), batch["label"])
        if self.case.value_head:
            loss = loss + outputs[:, -1].float().square().mean()
        return loss, {"loss": loss.detach()}


class Bert(nn.Module):
    """BERT with random weights, from embeddings (N, L, D) to class logits."""

    def __init__(self, *, layers: int, width: int, heads: int | None = None):
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.model = BertForSequenceClassification(
            BertConfig(
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads or width // 64,
                intermediate_size=4 * width,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                num_labels=2,
            )
        )

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(ids)

    def forward(self, embeddings: Tensor) -> Tensor:
        mask = embeddings.new_ones(embeddings.shape[:2], dtype=torch.long)
        return self.model(inputs_embeds=embeddings, attention_mask=mask).logits


def vit(size: int, patch: int, width: int, depth: int, classes: int, **changes) -> nn.Module:
    shape = {"image_size": [size, size], "patch": patch, "width": width, "depth": depth}
    rest = {"heads": width // 64, "pool": "token", "dropout": 0.0, "activation": "gelu"}
    return ViT(classes=classes, **(shape | rest | changes))


def impala(channels: list[int]) -> Callable[[], nn.Module]:
    return partial(Impala, actions=15, channels=channels, hidden=256, image_size=[64, 64])


def images(size: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, 3, size, size, device=DEVICE)


def tokens(length: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(30000, (count, length), device=DEVICE)


ALL_RIVALS = ("mixup", "sam", "asam", "jacobian")
GPU_CASES = {
    "vit_tiny": Case(
        "ViT-Tiny, 32x32", partial(vit, 32, 4, 192, 12, 10), images(32), 10, 256, 128,
        epoch=50000, rivals=ALL_RIVALS,
    ),
    "resnet18": Case(
        "ResNet18, 32x32", partial(cifar_resnet18, classes=10), images(32), 10, 256, 128,
        epoch=50000,
    ),
    "vit_b32": Case(
        "ViT-B/32, 224x224, 1000 classes", partial(vit, 224, 32, 768, 12, 1000), images(224),
        1000, 512, 256, components=3,
    ),
    "bert": Case(
        "BERT-base, length 128", partial(Bert, layers=12, width=768), tokens(128),
        2, 32, 16,
    ),
    "procgen": Case(
        "Procgen update, IMPALA", impala([16, 32, 32]), images(64), 15, 4096, 2048,
        components=3, anchored=False, value_head=True,
    ),
}  # fmt: skip
CPU_CASES = {
    "vit_tiny": Case(
        "micro ViT, 32x32", partial(vit, 32, 8, 64, 4, 10), images(32), 10, 100, 50,
        epoch=2000, rivals=ALL_RIVALS,
    ),
    "resnet18": Case(
        "ResNet18, 32x32", partial(cifar_resnet18, classes=10), images(32), 10, 8, 4
    ),
    "vit_b32": Case(
        "small ViT, 64x64, 1000 classes", partial(vit, 64, 32, 192, 2, 1000), images(64),
        1000, 32, 16, components=3,
    ),
    "bert": Case(
        "small BERT, length 32", partial(Bert, layers=2, width=128), tokens(32), 2, 8, 4
    ),
    "procgen": Case(
        "Procgen update, small IMPALA", impala([4, 8, 8]), images(64), 15, 32, 16,
        components=3, anchored=False, value_head=True,
    ),
}  # fmt: skip


def penalty(case: Case, components: int | None) -> EDRegularizer:
    sampler, own = ed.RandomizedCosine(), {"pairs": case.pairs, "anchored": case.anchored}
    return EDRegularizer(7.0, sampler, **own, components=components)


RIVALS: dict[str, Callable[[], Regularizer]] = {
    "mixup": lambda: Mixup(1.0, per_example=False),
    "sam": lambda: Sam(0.05),
    "asam": lambda: Asam(0.5, eta=0.01, scope="weights"),
    "jacobian": lambda: Jacobian(0.1, projections=1),
}
