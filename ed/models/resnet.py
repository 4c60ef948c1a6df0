"""ResNet18 for CIFAR: a 3x3 stem with stride 1, no max-pool, and 64 to 512 channels."""

from torch import nn
from torchvision.models import resnet18


def cifar_resnet18(*, classes: int = 10) -> nn.Module:
    """torchvision's ResNet18 with a CIFAR stem and torch's default initialisation.

    This is the network of kuangliu/pytorch-cifar, as used in the study that the paper's model pool
    follows. torchvision's own initial weights are larger.
    """
    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return model
