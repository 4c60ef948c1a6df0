"""ImageNet-1k and its five distribution shifts.

    train, validation = open_training("/data/imagenet")     # or parquet files, or a hub id
    shift = open_shift("objectnet", "/data/objectnet-1.0")  # v2, r, a, sketch, objectnet
    batches = training_batches(train, CLIP.train, batch_size=512, steps=range(start, total),
                               seed=seed, device=device)    # {"x": uint8 (B, 3, H, W), "label"}
    percent, loss = accuracy(model, shift, view=CLIP.evaluate, normalise=task.normalise,
                             device=device)

Modules: `classes` (class names and index maps), `sources` (opens and checks files), `views` (turns
an image into uint8 pixels), `loading` (worker processes, order, copies to the device) and
`evaluation` (evaluation sets and accuracy).
"""

from ed.datasets.imagenet.evaluation import (
    EvaluationSet,
    accuracy,
    open_shift,
    restrict,
    shifts,
)
from ed.datasets.imagenet.loading import evaluation_batches, training_batches
from ed.datasets.imagenet.sources import ImageError, Source, open_split, open_training
from ed.datasets.imagenet.views import CLIP, Views

__all__ = [
    "CLIP",
    "EvaluationSet",
    "ImageError",
    "Source",
    "Views",
    "accuracy",
    "evaluation_batches",
    "open_shift",
    "open_split",
    "open_training",
    "restrict",
    "shifts",
    "training_batches",
]
