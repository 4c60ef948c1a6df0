"""Tests that only plain CLIP models from open_clip, with CLIP's own tokenizer, are supported."""

import pytest
import torch

from ed.models.clip import build

open_clip = pytest.importorskip("open_clip")


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("ViT-B-16-SigLIP", "custom_text"),
        ("coca_ViT-B-32", "multimodal_cfg"),
        ("roberta-ViT-B-32", "hf_model_name, hf_tokenizer_name"),
        ("ViT-L-14-CLIPA", "hf_tokenizer_name, tokenizer_kwargs"),
        ({"embed_dim": 8, "text_cfg": {"tokenizer_mode": "bert"}}, "tokenizer_mode"),
    ],
)
def test_other_open_clip_models_are_rejected(architecture, why):
    """Such models would raise a TypeError or build a zero-shot head from wrong tokens."""
    with pytest.raises(ValueError, match=rf"model.architecture=.*{why}"):
        build(architecture)


@pytest.mark.parametrize("architecture", ["ViT-B-32-quickgelu", "RN50"])
def test_plain_models_are_built(architecture):
    with torch.device("meta"):
        assert isinstance(build(architecture), open_clip.CLIP)
