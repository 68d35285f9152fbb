"""How far step 0 may be from ln 2: as far as rounding goes, by precision, beta and the lengths of the responses."""

import pytest
import torch

from sfm_dpo.train.metrics import LOGP_NOISE, loss_scale, step_0_tolerance

BETA = {"sigmoid_norm": 5.0, "sigmoid": 0.1}


@pytest.mark.parametrize("precision", ["bf16", "no"])
@pytest.mark.parametrize("loss", BETA)
@pytest.mark.parametrize("tokens", [2, 50, 4000])
def test_rounding_passes_and_a_wrong_reference_does_not(loss, precision, tokens):
    """Of 4,096 pairs whose tokens are off by noise, and by noise and a twentieth of a nat on every rejected token."""
    generator, mask = torch.Generator().manual_seed(0), torch.ones(2, tokens)
    scale = loss_scale(mask, loss)
    tolerance = step_0_tolerance(mask, scale, BETA[loss], precision).item()
    noise = torch.randn(4096, 2, generator=generator) * LOGP_NOISE[precision] * tokens**0.5
    error = BETA[loss] * (noise / scale).diff(dim=1).abs() / 2
    assert error.mean() < tolerance / 2 and error.quantile(0.999) < tolerance
    wrong = BETA[loss] * 0.05 * tokens / scale[0].item() / 2
    if precision == "no" or tokens >= 50:  # two tokens in bf16 cannot tell
        assert wrong > tolerance
