"""ImageNet-1k classification from scratch."""

from ed.tasks.imagenet_data import ImageNetTask, Views

RANDAUGMENT_OPERATIONS = 2
VIEWS = {
    "crop": Views(),
    "randaugment": Views(randaugment=RANDAUGMENT_OPERATIONS),
}


class ImageNet(ImageNetTask):
    """Random crop and flip, with RandAugment or without; pixels in [-1, 1]; cross-entropy."""

    def __init__(
        self,
        data: str,
        *,
        validation: str,
        repeat: int,
        augment: str,
        epochs: int,
        warmup_epochs: float,
        batch_size: int,
        space: str,
        eval_every: int,
        classes: int,
        image_size: list[int],
    ):
        if augment not in VIEWS:
            raise ValueError(f"task.augment={augment}: use {' or '.join(VIEWS)}")
        super().__init__(
            data,
            VIEWS[augment],
            validation=validation,
            repeat=repeat,
            epochs=epochs,
            warmup_epochs=warmup_epochs,
            batch_size=batch_size,
            space=space,
            eval_every=eval_every,
            classes=classes,
            image_size=image_size,
        )
