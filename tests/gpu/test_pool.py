"""GPU tests of the correlation pool: channels-last layout, device syncs, memory."""

import warnings
from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate

import ed
from ed.engine.compose import compose_config
from tests.helpers.gpu import losses, make_step

pytestmark = pytest.mark.gpu


def test_channels_last_equals_contiguous_in_a_captured_step():
    """Fused momentum assumes that weights, gradients and state have the same layout."""
    overrides = ["model=resnet18", "optimizer=sgd", "optimizer.lr=0.01"]
    plain, last = (make_step(overrides, capture=True) for _ in range(2))
    last.model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(losses(last, 0, 10), losses(plain, 0, 10), rtol=2e-2, atol=1e-3)
    for weight, state in last.optimizer.state.items():
        assert state["momentum_buffer"].stride() == weight.stride()


@pytest.mark.parametrize("name", ["gap", "sharpness", "adaptive_sharpness"])
def test_number_of_device_syncs_in_a_measure_does_not_grow_with_batches(name):
    step = make_step(["model=vit_micro", f"measures={name}"])
    measure = instantiate(compose_config([f"measures={name}"]).measures[name], _convert_="all")

    def waits(batch_size: int) -> int:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            replace(measure, batch_size=batch_size)(step.model, step.task)
        return sum("synchroniz" in str(warning.message) for warning in seen)

    waits(1000)  # allocates pinned memory and creates library handles
    torch.set_warn_always(True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        assert waits(100) == waits(1000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)


def test_paper_protocol_stays_within_its_memory_budget_on_a_thousand_classes():
    """All 80,000 images (400 paths of 200 nodes) would need 45 GiB, not counting activations."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224").cuda()
    x = torch.randn(800, 3, 224, 224, device="cuda")
    model(x[:2])  # libraries allocate memory on first use
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ed.estimate(model, x, memory_gib=1.0)
    assert (len(result.values), len(result.spectrum)) == (400, 41)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2**30
