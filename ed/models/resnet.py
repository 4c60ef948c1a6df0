"""ResNet18 in its CIFAR form: 3x3 stride-1 stem, no max-pool, otherwise torchvision's."""

from torch import nn
from torchvision.models import resnet18


def cifar_resnet18(*, classes: int) -> nn.Module:
    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model
