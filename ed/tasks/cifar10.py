"""CIFAR-10 classification: the paper's main image task."""

from ed.tasks.images import PictureTask
from ed.tasks.pictures import Pictures, load_pictures


class Cifar10(PictureTask):
    """Pictures on the device, random crop and flip, cross-entropy."""

    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

    def load(self, split: str) -> Pictures:
        return load_pictures(self.data, split, classes=self.classes, size=self.image_size)
