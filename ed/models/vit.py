"""Vision transformers for small pictures (timm's, at another size), cut where paths may run."""

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


class ViT(VisionTransformer):
    """timm's ViT; `width 192, depth 12, heads 3, patch 4` at 32 x 32 is the paper's ViT-Tiny.

    `pool="token"` reads the class token; `"avg"` drops it and averages the patches, which leaves
    64 instead of 65 tokens.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: list[int],
        patch: int,
        width: int,
        depth: int,
        heads: int,
        pool: str,
        dropout: float,
        activation: str,
    ):
        if width % heads:
            raise ValueError(f"model.width={width} is not a multiple of model.heads={heads}")
        if any(side % patch for side in image_size):
            raise ValueError(f"model.patch={patch} does not divide task.image_size={image_size}")
        super().__init__(
            img_size=tuple(image_size),
            patch_size=patch,
            num_classes=classes,
            embed_dim=width,
            depth=depth,
            num_heads=heads,
            global_pool=pool,
            class_token=pool == "token",
            pos_drop_rate=dropout,
            proj_drop_rate=dropout,
            act_layer=activation,
        )

    def to_space(self, x: Tensor, space: str) -> Tensor:
        """Pixels -> the features after the embedding ("embedding") or after the first block."""
        x = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
        return self.blocks[0](x) if space == "block1" else x

    def from_space(self, features: Tensor, space: str) -> Tensor:
        """The rest of the network: features of `to_space` -> outputs."""
        for block in self.blocks[1:] if space == "block1" else self.blocks:
            features = block(features)
        return self.forward_head(self.norm(features))
