"""Files with wrong content, and files that try to run code.

The code would create a folder that tests look for.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
import yaml

# instead of a JSON or YAML mapping
WRONG = {"list": b"[1]", "empty": b"{}", "binary": b"\xff\x00\xfe", "deep": b"[" * 100_000}


class Payload:
    """Creates the folder `marker` when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def hostile_leaves(folder: Path, marker: Path) -> dict[str, dict]:
    """Returns config leaves that create `marker` when instantiated, by type of attack."""
    np.save(folder / "payload.npy", np.array([Payload(marker)], dtype=object), allow_pickle=True)
    torch.save(Payload(marker), folder / "payload.pt")
    (folder / "hubconf.py").write_text(f"import os\nos.mkdir({str(marker)!r})\ndef go(): pass\n")
    call = {"_target_": "os.mkdir", "path": str(marker)}
    vit = "ed.models.vit.ViT"
    return {
        "numpy": {
            "_target_": "numpy.load",
            "file": f"{folder}/payload.npy",
            "allow_pickle": True,
        },
        "torch": {"_target_": "torch.load", "f": f"{folder}/payload.pt", "weights_only": False},
        "hub": {
            "_target_": "torch.hub.load",
            "repo_or_dir": str(folder),
            "model": "go",
            "source": "local",
        },
        "os": call,
        "nested": {"_target_": vit, "image_size": [[call]]},
        "argument": {"_target_": vit, "width": call},
        "re-exported": {"_target_": "ed.runtime.files.os.mkdir", "path": str(marker)},
        "positional": {"_target_": vit, "_args_": [call]},
        "interpolated": {"_target_": "${seed}", "path": str(marker)},
    }


def write_remote_code(folder: Path, model_type: str) -> str:
    """Writes a transformers model whose files ask to run own.py; returns its folder."""
    parts = ("Config", "ModelForImageClassification", "ModelForSequenceClassification")
    parts += ("ImageProcessor", "Tokenizer")
    own = {"auto_map": {f"Auto{part}": "own.Own" for part in parts}}
    own["auto_map"]["AutoTokenizer"] = [None, "own.Own"]
    kind = "Own" if model_type == "own" else "ViTImageProcessor"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(own | {"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(own | {"image_processor_type": kind})
    )
    return str(folder)


def plant(run: Path, key: str, leaf: dict) -> None:
    """Replaces the leaf at a dotted key in a run folder's config."""
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    *parents, last = key.split(".")
    inner = config
    for name in parents:
        inner = inner[name]
    inner[last] = leaf
    path.write_text(yaml.safe_dump(config))
