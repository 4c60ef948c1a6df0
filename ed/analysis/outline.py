"""The outline of the paper: its sections, its claims, and data that has to be added by hand."""

from dataclasses import dataclass

# sections of the report, in the paper's order; unlisted tables come last
PARTS = {
    "Effective degree and generalization": (
        "correlation_resnet18",
        "correlation_resnet18_short",
        "correlation_clip_mixup",
        "grokking",
        "grokking_search",
    ),
    "Image classification": ("table1", "table1_100", "table1_tuning", "imagenet_scratch"),
    "CLIP fine-tuning": ("clip_ood", "clip_standin", "clip_standin_pretrain"),
    "Text classification": ("glue", "glue_grid", "glue_minilm", "glue_minilm_tuning"),
    "Reinforcement learning": ("procgen", "procgen_short"),
    "More correlations": ("correlation_vit", "correlation_clip", "correlation_random_pixels"),
    "Ablations": ("random_pixels", "basis", "feature_space", "sampling", "pca", "resolution"),
    "Failure case": ("mnist_cifar",),
    "Polynomial networks": ("pnn",),
    "Beyond the paper": (
        "crop",
        "crop_300",
        "baseline_gap",
        "ed_fast",
        "ed_fast_300",
        "kernels",
    ),
}
REST, PROBES = "More experiments", "Probes: short side questions"

# data and weights that a table needs and that cannot be downloaded automatically
MISSING = {
    "imagenet_scratch": "ImageNet",
    "clip_ood": "ImageNet, its shifted test sets and OpenAI's CLIP weights",
    "correlation_clip": "ImageNet and the model-soups checkpoints",
    "correlation_clip_mixup": "ImageNet and the model-soups checkpoints",
    "glue": "BERT-base weights",
    "glue_grid": "BERT-base weights",
}


@dataclass(frozen=True)
class Claim:
    """A claim that the paper supports with one table or figure.

    Attributes:
        table: the experiment file that reproduces it.
        reference, treated: cells to compare; the first treated cell that has runs is used.
        metric: the metric to compare; by default the table's first.
        paper: the claim in words, where the paper prints no numbers.
        stand_in: a shortened table, used until the real one has runs.
    """

    table: str
    text: str
    reference: str | None = None
    treated: tuple[str, ...] = ()
    metric: str | None = None
    paper: str = ""
    stand_in: str | None = None


CLAIMS = (
    Claim(
        "correlation_resnet18",
        "ED predicts the generalization gap (ResNet18)",
        paper="r > 0, the strongest measure",
        stand_in="correlation_resnet18_short",
    ),
    Claim(
        "correlation_clip_mixup",
        "ED predicts the generalization gap (CLIP)",
        paper="r > 0",
    ),
    Claim(
        "grokking_search",
        "ED peaks where a network starts to generalize (grokking)",
        paper="a peak at the transition (x / y, 30 %)",
    ),
    Claim(
        "table1",
        "ED raises accuracy on CIFAR-10 (ViT-Tiny)",
        "baseline",
        ("ed", "ed_efficiency"),
    ),
    Claim(
        "table1",
        "So does ED without label anchoring (LA)",
        "baseline",
        ("ed_without_anchors", "ed_without_anchors_performance"),
    ),
    Claim(
        "imagenet_scratch",
        "ED raises accuracy on ImageNet (ViT-S/16)",
        "original",
        ("original_ed",),
    ),
    Claim(
        "clip_ood",
        "ED raises out-of-distribution accuracy (CLIP ViT-B/16)",
        "b16",
        ("b16_ed",),
        metric="eval/acc_ood",
    ),
    Claim("glue", "ED raises accuracy on RTE (GLUE, BERT-base)", "rte", ("rte_ed",)),
    Claim(
        "procgen",
        "ED raises returns on unseen Procgen levels (PPO)",
        paper="higher with ED",
        stand_in="procgen_short",
    ),
    Claim(
        "mnist_cifar",
        "ED keeps the MNIST shortcut (accuracy with MNIST randomized)",
        "baseline",
        ("ed",),
        metric="eval/acc_mnist_randomized",
    ),
    Claim("pnn", "ED grows with the degree of a polynomial network", "task1", ("task3",)),
)
