"""Floating-point modes are switched for a while and then back."""

import pytest
import torch

from invformer.numerics.precision import denormals_flushed

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
