"""Small setups of every task with each regularizer it supports, on generated data."""

import importlib.util
from pathlib import Path

import numpy as np

from ed.engine.compose import compose_config
from ed.engine.main import run
from tests.helpers.small import SMALL, SMALL_GROKKING

REGULARIZERS = ("none", "mixup", "sam", "asam", "jacobian", "ed")
# tasks that do not support every regularizer
SUPPORTED = {
    "pnn": ("none", "sam", "asam", "jacobian"),
    "procgen": ("none", "sam", "asam", "jacobian", "ed"),
    "clip_standin_pretrain": ("none", "sam", "asam", "jacobian", "ed"),
}
NEEDED = {  # packages that are not in the `train` extra
    "glue": "transformers",
    "text_classification": "transformers",
    "transformers": "transformers",
    "clip_standin": "open_clip",
    "clip_standin_pretrain": "open_clip",
}
RECORDED = ["system.device=cpu", "system.log_every=1", "system.save_seconds=0"]
EPOCH = ["task.epochs=1", "task.warmup_epochs=0", "task.eval_every=1", *RECORDED]
TOWERS = "model.architecture"
CLIP = [
    f"{TOWERS}.embed_dim=16",
    f"{TOWERS}.vision_cfg.patch_size=16",
    f"{TOWERS}.text_cfg.width=16",
]
CLIP += [f"{TOWERS}.vision_cfg.{s}" for s in ("width=32", "layers=1", "head_width=16")]
CLIP += [f"{TOWERS}.text_cfg.layers=1", "task.data=embedded", "task.batch_size=500", *EPOCH]
VIT = ["model.width=16", "model.depth=1", "model.heads=2"]


def tasks(data: Path) -> dict[str, list[str]]:
    """Returns the overrides of each task; `write_data` writes the files they refer to."""
    images = ["task=image_folder", f"task.data={data / 'images'}", "task.image_size=[32,32]"]
    images += ["task.batch_size=8", *EPOCH]
    return {
        "cifar10": [*SMALL, "task.batch_size=500", *RECORDED],
        "mnist_cifar": [
            "task=mnist_cifar", f"task.data={data / 'cifar'}", f"task.mnist={data / 'mnist'}",
            "task.batch_size=2", "model=vit_tiny", "model.patch=16", *VIT, *EPOCH,
        ],
        "imagenet": [
            "task=imagenet", "task.data=embedded", "task.image_size=[16,16]", "model=vit_s16",
            "task.batch_size=500", "system.workers=0", *VIT, *EPOCH,
        ],
        "image_folder": [*images, "model=timm", "model.name=test_resnet"],
        "transformers": [*images, "model=transformers", f"model.name={data / 'vit'}"],
        "clip_standin_pretrain": [
            "task=clip_standin_pretrain", "model=clip_small_pretrain", "task.part=1", *CLIP,
        ],
        "clip_standin": [
            "task=clip_standin", "model=clip_small", f"model.weights={data / 'clip' / 'last.pt'}",
            *CLIP,
        ],
        "glue": [
            "task=glue", f"task.data={data / 'glue'}", "task.name=cola", "task.batch_size=8",
            "task.max_length=24", "model=bert_base", f"model.checkpoint={data / 'bert'}", *EPOCH,
        ],
        "text_classification": [
            "task=text_classification", f"task.data={data / 'reviews.csv'}", "task.text=review",
            "task.label=verdict", "task.max_length=16", "task.batch_size=4", "model=transformers",
            f"model.name={data / 'bert'}", *EPOCH,
        ],
        "grokking": [*SMALL_GROKKING, "measures=norm", "system.save_seconds=0"],
        "pnn": [
            "task=pnn", "task.steps=6", "task.warmup_steps=0", "task.examples=20", "model=pnn",
            "model.width=4", *RECORDED,
        ],
        "procgen": procgen(),
    }  # fmt: skip


def procgen() -> list[str]:
    """Returns overrides for games that end with each rollout, so resuming is bitwise exact."""
    from tests.helpers import games

    length = ["task.num_steps=10", "task.num_test_steps=10", "task.frames=120"]
    return [*games.SMALL, "model.channels=[]", *length, "system.save_seconds=0"]


def setups(data: Path) -> dict[str, list[str]]:
    """Returns overrides by "task regularizer", for tasks whose packages are installed."""
    found = {}
    for task, overrides in tasks(data).items():
        if task in NEEDED and importlib.util.find_spec(NEEDED[task]) is None:
            continue
        for name in SUPPORTED.get(task, REGULARIZERS):
            own = [f"regularizer={name}"]
            if name == "ed" and task in SUPPORTED:  # these tasks have no labels
                own += ["regularizer.anchored=false"]
            found[f"{task} {name}"] = [*overrides, *own]
    return found


def preload() -> None:
    """Imports optional packages before forking and silences transformers."""
    for name in ("timm", "datasets", "open_clip"):
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    if importlib.util.find_spec("transformers"):
        import transformers
        from transformers import BertForSequenceClassification, BertTokenizerFast  # noqa: F401
        from transformers import ViTForImageClassification as _  # noqa: F401

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()


def write_data(data: Path) -> None:
    """Writes data for all tasks whose packages are installed."""
    from tests.tasks.test_mnist_cifar import write_set

    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        labels = np.arange(60) % 10
        write_set(data / "cifar", split, "img", pixels(rng, 60, (32, 32, 3)), labels)
        write_set(data / "mnist", split, "image", pixels(rng, 20, (28, 28)), np.arange(20) % 2)
    if importlib.util.find_spec("transformers"):
        _write_for_transformers(data)
    if importlib.util.find_spec("open_clip"):
        pretrained = [*tasks(data)["clip_standin_pretrain"], f"system.run_dir={data / 'clip'}"]
        run(compose_config(pretrained), ["fault"])


def pixels(rng: np.random.Generator, count: int, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8)


def _write_for_transformers(data: Path) -> None:
    import torch
    import transformers

    from tests.helpers.own_data import write_texts
    from tests.helpers.text import write_checkpoint, write_sentences
    from tests.tasks.test_own_data import write_images

    for name in ("glue", "bert"):
        (data / name).mkdir()
    write_sentences(data / "glue")
    write_checkpoint(data / "bert")
    write_texts(data / "reviews.csv")
    write_images(data / "images" / "train")
    write_images(data / "images" / "val", 3)
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, intermediate_size=16, num_labels=3, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(data / "vit")
