"""ResNet18 in its CIFAR form: 3x3 stride-1 stem, no max-pool, stages of 64 to 512 channels."""

from torch import nn
from torchvision.models import resnet18


def cifar_resnet18(*, classes: int = 10) -> nn.Module:
    """torchvision's ResNet18 with another stem, from torch's default initial weights.

    That is the network of kuangliu/pytorch-cifar, which the work that the paper's pool follows
    uses; torchvision itself would begin with larger weights.
    """
    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return model
