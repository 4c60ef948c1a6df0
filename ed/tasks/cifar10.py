"""CIFAR-10 classification: the paper's main image task."""

from ed.tasks.image_task import ImageTask


class Cifar10(ImageTask):
    """CIFAR-10 with random crops and flips, kept on the device."""

    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
