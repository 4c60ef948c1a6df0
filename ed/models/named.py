"""Loads networks from timm and transformers by name."""

import contextlib
import difflib
import logging

import torch
from torch import Tensor, nn

from ed.core.validate import brief
from ed.models.text import NO_CODE, TextClassifier, checkpoint_source, load_classifier
from ed.runtime.hub import hub_or_cache

OFFLINE = "set model.pretrained=false, or run once with access to the hub"
FOLDER = "use a hub id, or a folder with config.json and weights, e.g. in $ED_CHECKPOINTS"
logger = logging.getLogger("ed")


def timm_model(
    name: str, *, classes: int, pretrained: bool = False, image_size: list[int] | None = None
) -> nn.Module:
    """Builds a timm image classifier, for `image_size` if its architecture has a fixed size."""
    import timm

    given = f"model.name={name}"
    check_timm_name(name, given)
    settings = timm.models.get_pretrained_cfg(name) if ":" not in name else None
    sized = image_size is not None and settings is not None and settings.fixed_input_size
    size = {"img_size": tuple(image_size)} if sized else {}
    return load_timm(name, given, OFFLINE, pretrained=pretrained, num_classes=classes, **size)


def transformers_model(
    name: str, *, classes: int, pretrained: bool = True, image_size: list[int] | None = None
) -> nn.Module:
    """Builds an image or text classifier from transformers.

    If the architecture has a fixed image size, pretrained models keep theirs, and models with new
    weights use `image_size`.
    """
    from transformers import AutoModelForImageClassification as ForImages
    from transformers import AutoModelForSequenceClassification as ForText

    given = f"model.name={name}"
    config = _config(name, given, num_labels=classes)
    if type(config) in ForImages._model_mapping:
        if image_size is not None and hasattr(config, "image_size") and not pretrained:
            config.image_size = list(image_size)
        return ImageClassifier(_images(name, given, config, ForImages, pretrained), image_size)
    if type(config) not in ForText._model_mapping:
        raise ValueError(
            f"{given}: transformers has no image or text classifier for {config.model_type}; use "
            "another model"
        )
    model = load_classifier(name, classes, given) if pretrained else ForText.from_config(config)
    return TextClassifier.of(model, classes=classes, given=given)


class ImageClassifier(nn.Module):
    """Maps pixels (N, 3, H, W) to logits (N, classes), with a transformers image classifier.

    Args:
        wanted: size of the task's images. If the model does not accept it, `image_size` is set to
            the model's own size.
    """

    def __init__(self, model: nn.Module, wanted: list[int] | None = None):
        super().__init__()
        self.model = model.float()  # transformers keeps the stored precision
        size = getattr(model.config, "image_size", None)
        if size is not None and not (wanted and self._takes(wanted)):
            self.image_size = [size, size] if isinstance(size, int) else list(size)
        self.train()

    @torch.no_grad()
    def _takes(self, size: list[int]) -> bool:
        """Tries a forward pass, as convolutional networks also accept other sizes."""
        try:
            self.eval()(torch.zeros(1, 3, *size))
        except (RuntimeError, ValueError):
            return False
        return True

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def check_timm_name(name: str, given: str) -> None:
    """Raises ValueError with similar names if timm has no such architecture."""
    import timm

    architecture = name.split(".")[0]
    if ":" not in name and not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "see timm.list_models()"
        raise ValueError(f"{given}: no such model; {hint}")


def load_timm(name: str, given: str, remedy: str, *, pretrained: bool, **settings) -> nn.Module:
    """Calls `timm.create_model`; failures raise a one-line error that ends with `remedy`."""
    import timm

    # timm would silently use random weights
    if pretrained and ":" not in name and not timm.models.is_model_pretrained(name):
        raise ValueError(f"{given}: timm has no pretrained weights for this model; {remedy}")
    remote = (pretrained or ":" in name) and not name.startswith("local-dir:")
    try:
        with hub_or_cache(name) if remote else contextlib.nullcontext():
            return timm.create_model(name, pretrained=pretrained, **settings)
    except Exception as error:  # many causes: offline, unknown tag, no access, ...
        raise unreachable(given, error, remedy) from error


def unreachable(given: str, error: Exception, remedy: str) -> ValueError:
    return ValueError(f"{given}: could not be loaded ({brief(error)}); {remedy}")


def _config(name: str, given: str, **settings):
    from transformers import AutoConfig

    source = checkpoint_source(name)
    try:
        with hub_or_cache(source):
            return AutoConfig.from_pretrained(source, **settings, **NO_CODE)
    except Exception as error:
        raise unreachable(given, error, FOLDER) from error


def _images(name: str, given: str, config, kind, pretrained: bool) -> nn.Module:
    if not pretrained:
        return kind.from_config(config)
    source, how = checkpoint_source(name), {"config": config, "output_loading_info": True} | NO_CODE
    try:
        with hub_or_cache(source):
            # replaces the head if its number of classes differs
            model, loaded = kind.from_pretrained(source, ignore_mismatched_sizes=True, **how)
    except Exception as error:
        raise unreachable(given, error, FOLDER) from error
    new = [*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])]
    if new:
        logger.info("%s: new weights for %s", given, ", ".join(sorted(new))[:120])
    return model
