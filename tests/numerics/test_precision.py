"""Floating-point modes are switched for a while and then back."""

import math

import pytest
import torch

from invformer.numerics.lambert_w import phi_inverse_upper
from invformer.numerics.precision import denormals_flushed
from invformer.numerics.rounding import product_up, quotient_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound

SUPPORTED = torch.set_flush_denormal(False)


@pytest.mark.skipif(not SUPPORTED, reason="this CPU cannot flush denormals")
def test_denormals_are_zero_inside_and_numbers_again_outside() -> None:
    denormal = torch.tensor(1e-310)
    with denormals_flushed():
        assert (denormal * 1).item() == 0
        with denormals_flushed():
            pass
        assert (denormal * 1).item() == 0
    assert (denormal * 1).item() == 1e-310
    with pytest.raises(ZeroDivisionError), denormals_flushed():
        raise ZeroDivisionError
    assert (denormal * 1).item() == 1e-310


@pytest.mark.skipif(not SUPPORTED, reason="this CPU cannot flush denormals")
def test_no_bound_is_flushed_to_zero_with_the_denormals() -> None:
    small = 1e-310
    weights = [torch.full((2, 2), 1e-40, dtype=torch.float32), torch.full((2, 2), 1e-39).bfloat16()]
    weights += [torch.full((3, 2), 6e-8).half(), torch.full((2, 2), 1e-310)]
    truths = [2e-40, 2e-39, 1e-7, 2e-310]
    with denormals_flushed():
        bounds = [spectral_norm_bound(w).view(torch.int64).item() for w in weights]
        up = [
            product_up(small, 1e200), product_up(1e-200, 1e-200), sum_up(small, 0.0),
            sqrt_up(small), quotient_up(small, 1e-300), phi_inverse_upper(-714.0),
        ]  # fmt: skip
        assert spectral_norm_bound(torch.zeros(2, 2)).view(torch.int64).item() == 0
    assert torch.tensor(bounds[2]).view(torch.float64).item() < 1.5e-7
    for bits, truth in zip(bounds, truths, strict=True):
        assert torch.tensor(bits).view(torch.float64).item() >= truth
    exact = [small * 1e200, 0.0, small, math.sqrt(small), small / 1e-300, math.exp(-715)]
    assert all(bound >= value for bound, value in zip(up, exact, strict=True))
