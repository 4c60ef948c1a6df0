"""Measure and penalise ED in the feature space of a timm backbone.

Paths connect features of images. For DINO, use vit_small_patch16_224.dino and --pretrained.
"""

import sys

import timm
import torch
from torch.nn import functional as F

import ed
from ed.datasets.images import load_images


def main(count: int = 100, steps: int = 100) -> None:
    torch.manual_seed(0)
    backbone = timm.create_model("resnet18", pretrained="--pretrained" in sys.argv, num_classes=0)
    config = timm.data.resolve_model_data_config(backbone)
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    images = load_images("embedded", "test", classes=10, size=(32, 32))  # 500 CIFAR-10 images
    pixels, labels = images.pixels[:count], images.labels[:count]
    pixels = F.interpolate((pixels / 255 - mean) / std, config["input_size"][1:], mode="bilinear")
    backbone.eval().requires_grad_(False)
    features = torch.cat([backbone(part) for part in pixels.split(50)])
    features = (features - features.mean(0)) / features.std(0).clamp(min=1e-6)
    layers = torch.nn.Linear(features.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    head = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = F.cross_entropy(head(features), labels) + ed.penalty(head, features, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(ed.estimate(ed.Field.of(head, features), pairs=50, resolution=50, degree=20))


if __name__ == "__main__":
    main()
