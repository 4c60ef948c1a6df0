"""ImageNet-1k and the sets that shift it: what the tasks `imagenet` and `clip_finetune` share.

    train, validation = open_training("/data/imagenet")     # folders, parquet files, or a hub id
    shift = open_shift("objectnet", "/data/objectnet-1.0")  # v2, r, a, sketch, objectnet
    batches = training_batches(train, CLIP.train, batch_size=512, steps=range(start, total),
                               seed=seed, device=device)    # {"x": uint8 (B, 3, H, W), "label"}
    percent, loss = accuracy(model, shift, view=CLIP.evaluate, normalise=task.normalise,
                             device=device)

One idea per module: `classes` (names and index maps), `sources` (where pictures lie and what is
wrong there), `views` (from a picture to uint8 pixels), `loading` (worker processes, order, copies
to the device), `evaluation` (sets, restriction to their classes, accuracy), `task` (all of it as a
task: a subclass says which views it takes and which sets it is evaluated on).
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
