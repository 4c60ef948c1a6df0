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

from ed.tasks.imagenet_data.evaluation import (
    EvaluationSet,
    accuracy,
    open_shift,
    restrict,
    shifts,
)
from ed.tasks.imagenet_data.loading import evaluation_batches, training_batches
from ed.tasks.imagenet_data.sources import PictureError, Source, open_split, open_training
from ed.tasks.imagenet_data.task import ImageNetTask
from ed.tasks.imagenet_data.views import CLIP, Views

__all__ = [
    "CLIP",
    "EvaluationSet",
    "ImageNetTask",
    "PictureError",
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
