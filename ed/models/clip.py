"""CLIP from open_clip: both towers, or the image tower with a zero-shot head.

Everything after the towers runs in float32. Logits are cosines multiplied by up to 100, and bf16
would round large ones to multiples of 1/8 or more.
"""

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ed.core.validate import brief
from ed.models.prompts import captions
from ed.models.weights import load_weights, read_weights
from ed.runtime import runs
from ed.runtime.console import track
from ed.runtime.extras import install
from ed.runtime.hub import hub_or_cache

LARGEST_SCALE = 100.0  # CLIP's upper limit on the logit scale
TEXT_BATCH = 2048  # captions per pass of the text tower
OTHER_MODEL = "use a plain CLIP from open_clip.list_models(), such as ViT-B-32-quickgelu or RN50"


class Towers(nn.Module):
    """Maps images (N, 3, H, W) to scaled cosines with each caption (N, classes * templates).

    `architecture` is the name of a plain CLIP in open_clip, or a mapping with its `embed_dim`,
    `vision_cfg`, `text_cfg` and `quick_gelu`. Each forward pass embeds all captions, as there are
    only a few.
    """

    def __init__(self, architecture: str | Mapping, *, prompts: str):
        super().__init__()
        self.clip = build(architecture)
        tokens = tokenise(captions(prompts), self.clip.context_length)
        self.register_buffer("tokens", tokens, persistent=False)

    @property
    def image_size(self) -> tuple[int, int]:
        return _sides(self.clip.visual)

    def forward(self, x: Tensor) -> Tensor:
        images, texts = self.clip.visual(x), self.clip.encode_text(self.tokens.flatten(0, 1))
        with _float32(x):
            rows = scale(self.clip) * F.normalize(texts.float(), dim=-1)
            return F.normalize(images.float(), dim=-1) @ rows.T

    def zero_shot(self) -> "ClipClassifier":
        """Returns a zero-shot classifier that shares the image tower."""
        return ClipClassifier(self.clip.visual, zero_shot_rows(self.clip, self.tokens))


class ClipClassifier(nn.Module):
    """Image classifier: image tower, L2 normalisation, and a linear head with weights `rows`."""

    def __init__(self, visual: nn.Module, rows: Tensor):
        super().__init__()
        self.visual = visual
        # skip_init, because evaluations build this head and must not use random numbers
        self.head = nn.utils.skip_init(nn.Linear, *rows.T.shape, device=rows.device)
        with torch.no_grad():
            self.head.weight.copy_(rows)
            self.head.bias.zero_()

    @property
    def image_size(self) -> tuple[int, int]:
        return _sides(self.visual)

    def forward(self, x: Tensor) -> Tensor:
        return self._classify(self.visual(x))

    def to_space(self, x: Tensor, space: str) -> Tensor:
        """Maps pixels to features after the embedding ("embedding") or first block ("block1")."""
        if not hasattr(self.visual, "transformer"):
            raise ValueError(
                f"task.space={space}: not supported by {type(self.visual).__name__}; use input"
            )
        x = self.visual._embeds(x)
        return self.visual.transformer.resblocks[0](x) if space == "block1" else x

    def from_space(self, features: Tensor, space: str) -> Tensor:
        """Maps features from `to_space` to outputs."""
        blocks = self.visual.transformer.resblocks
        for block in blocks[1:] if space == "block1" else blocks:
            features = block(features)
        pooled, _ = self.visual._pool(features)
        return self._classify(pooled @ self.visual.proj)

    def _classify(self, features: Tensor) -> Tensor:
        with _float32(features):
            return self.head(F.normalize(features.float(), dim=-1))


def classifier(
    architecture: str | Mapping,
    *,
    weights: str,
    prompts: str,
    classes: int,
    device: torch.device | str = "cpu",
) -> ClipClassifier:
    """Builds the classifier from which fine-tuning starts.

    Args:
        architecture: as for `Towers`.
        weights: `openai`, or a file with both towers (the head is then zero-shot) or with a
            fine-tuned classifier. `random` uses untrained weights, to test a pipeline.
        prompts: name of the caption set for the zero-shot head.
        device: device that computes the zero-shot head. For 1000 classes with 80 templates, this
            takes seconds on a GPU and an hour on a CPU.
    """
    texts = captions(prompts)
    if len(texts) != classes:
        raise ValueError(
            f"model.prompts={prompts}: has {len(texts)} classes, but task.classes={classes}; use "
            "prompts for the task's classes"
        )
    given = f"model.weights={weights}"
    state = {} if weights == "random" else _weights(architecture, weights)
    clip = build(architecture)
    random_rows = F.normalize(torch.randn(classes, clip.visual.output_dim), dim=-1)
    untrained = ClipClassifier(clip.visual, LARGEST_SCALE * random_rows)
    if weights == "random":
        return untrained
    if "head.weight" in state:
        return load_weights(untrained, state, given)
    load_weights(clip, {name.removeprefix("clip."): value for name, value in state.items()}, given)
    tokens = tokenise(texts, clip.context_length).to(device)
    return ClipClassifier(clip.visual, zero_shot_rows(clip.to(device), tokens))


def build(architecture: str | Mapping) -> nn.Module:
    """Builds open_clip's CLIP with random weights."""
    open_clip = _open_clip()
    if isinstance(architecture, str):
        settings = open_clip.get_model_config(architecture)
        if settings is None:
            raise ValueError(
                f"model.architecture={architecture}: open_clip has no such model; {OTHER_MODEL}"
            )
    else:
        settings = _plain(architecture)
    # reject settings that need other classes or tokenizers: wrong tokens would raise no error
    foreign = [key for key in settings if key not in inspect.signature(open_clip.CLIP).parameters]
    texts = settings.get("text_cfg", {})
    foreign += [key for key in texts if key.startswith(("hf_", "tokenizer_"))]
    if foreign:
        name = architecture if isinstance(architecture, str) else "{...}"
        raise ValueError(
            f"model.architecture={name}: not supported, as {', '.join(foreign)} would need another "
            f"text tower or tokenizer; {OTHER_MODEL}"
        )
    return open_clip.CLIP(**settings)


def tokenise(texts: list[list[str]], length: int) -> Tensor:
    """Converts captions (classes, templates) to token ids (classes, templates, length)."""
    flat = [text for row in texts for text in row]
    tokens = _open_clip().tokenize(flat)
    longest = int((tokens != 0).sum(1).max())
    if longest > length:
        raise ValueError(
            f"model.architecture.text_cfg.context_length={length}: a caption has {longest} tokens; "
            f"use at least {longest}"
        )
    return tokens[:, :length].unflatten(0, (len(texts), -1))


@torch.no_grad()
def zero_shot_rows(clip: nn.Module, tokens: Tensor) -> Tensor:
    """Computes zero-shot head weights (classes, features) from tokens (classes, templates, length).

    Each row is the mean of a class's normalised caption embeddings, normalised again and scaled.
    """
    parts = tokens.flatten(0, 1).split(TEXT_BATCH)
    with _float32(tokens):
        embedded = [
            clip.encode_text(part, normalize=True) for part in track(parts, "zero-shot head")
        ]
        means = torch.cat(embedded).unflatten(0, tokens.shape[:2]).mean(1)
        return scale(clip) * F.normalize(means, dim=-1)


def scale(clip: nn.Module) -> Tensor:
    return clip.logit_scale.exp().clamp(max=LARGEST_SCALE)


def _weights(architecture: str | Mapping, weights: str) -> dict[str, Tensor]:
    if weights != "openai":
        path, given = Path(weights).expanduser(), f"model.weights={weights}"
        if not path.is_file():
            raise FileNotFoundError(
                f"{given}: no such file; use `openai` (for CLIP ViT-B) or a weights file. For the "
                "stand-in, run python scripts/launch.py clip_standin_pretrain"
            )
        if runs.is_run(path.parent) and not runs.is_done(path.parent):
            raise ValueError(
                f"{given}: the run that trains it is not finished; wait, or resume it with its "
                "command. To use the file anyway, copy it to another folder"
            )
        return read_weights(path, given)
    open_clip = _open_clip()
    known = isinstance(architecture, str) and open_clip.get_pretrained_cfg(architecture, "openai")
    if not known or not open_clip.get_model_config(architecture).get("quick_gelu"):
        raise ValueError(
            f"model.architecture={architecture}: OpenAI's weights need a model with QuickGELU, "
            "such as ViT-B-32-quickgelu; for others, set model.weights=FILE"
        )
    try:
        with hub_or_cache(known["hf_hub"]), _no_logging():
            return open_clip.create_model(architecture, pretrained="openai").state_dict()
    except Exception as error:  # offline, access denied, disk full, ...
        raise ValueError(
            f"model.weights=openai: cannot load {architecture} ({brief(error)}); download "
            f"open_clip_model.safetensors of {known['hf_hub'].strip('/')} from the hub and set "
            "model.weights=FILE, or test the pipeline with model.weights=random"
        ) from error


@contextlib.contextmanager
def _no_logging() -> Iterator[None]:
    """Disables the root logger, as open_clip logs errors before it raises them."""
    root = logging.getLogger()
    before, root.disabled = root.disabled, True
    try:
        yield
    finally:
        root.disabled = before


def _plain(value):
    """Converts OmegaConf containers to the dicts and lists that open_clip expects."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _sides(visual: nn.Module) -> tuple[int, int]:
    """Returns height and width of a tower's images; ResNets store one number for both."""
    size = visual.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _float32(like: Tensor) -> contextlib.AbstractContextManager:
    return torch.autocast(like.device.type, enabled=False)


def _open_clip():
    try:
        import open_clip
    except ModuleNotFoundError as error:
        raise ValueError(f"CLIP models need {error.name}: {install('clip')}") from error
    return open_clip
