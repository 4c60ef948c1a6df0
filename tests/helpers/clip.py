"""A CLIP architecture small enough for tests."""

ARCHITECTURE = {
    "embed_dim": 16,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 2, "head_width": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
