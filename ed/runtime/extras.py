"""Errors about missing packages, with the extra of pyproject.toml that installs them."""

TRAIN = "PIL datasets huggingface_hub hydra jinja2 markdown_it markupsafe matplotlib numpy"
TRAIN += " omegaconf pyarrow pydantic rich safetensors scipy timm torchvision tqdm yaml"
EXTRA_OF = dict.fromkeys(TRAIN.split(), "train")  # import names, which pip may not know
EXTRA_OF |= {"open_clip": "clip", "transformers": "glue"}


def missing_package(error: BaseException | None) -> str | None:
    """Explains an error caused by a missing package of an extra; returns None for other errors."""
    while error is not None:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in EXTRA_OF:
            return f"{package} is not installed: {install(EXTRA_OF[package])}"
        error = error.__cause__
    return None


def install(extra: str) -> str:
    """Returns the remedy for a missing extra; it works in any folder, as ed is installed."""
    return f"run pip install 'effective-degree[{extra}]'"
