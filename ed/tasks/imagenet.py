"""ImageNet-1k classification from scratch."""

from ed.core.validate import choice
from ed.datasets.imagenet import Views
from ed.tasks.imagenet_task import ImageNetTask

VIEWS = {"crop": Views(), "randaugment": Views(randaugment=2)}


class ImageNet(ImageNetTask):
    """ImageNet with random crops and flips, and RandAugment if chosen; pixels in [-1, 1]."""

    def __init__(self, data: str, *, augment: str, **settings):
        choice("task.augment", augment, VIEWS)
        super().__init__(data, VIEWS[augment], **settings)  # rejects unknown settings
