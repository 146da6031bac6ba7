"""What a machine without a network is told to take along, and what the table says of the rest."""

from importlib.metadata import requires

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from invformer.kernels.attention import choose
from invformer.weights.position_bias import CausalMask
from tests.gpu.accept import WHEELS
from tests.gpu.machine import failed

OF_TORCH = {"torch", "typing-extensions"}


def test_every_wheel_has_what_it_needs() -> None:
    for wheel in set(WHEELS) - {"lightning"}:  # which asks for what it does not import here
        every = [Requirement(line) for line in requires(wheel) or []]
        needed = [one for one in every if one.marker is None or one.marker.evaluate({"extra": ""})]
        assert {canonicalize_name(one.name) for one in needed} <= {*WHEELS, *OF_TORCH}, wheel


def test_a_kernel_that_does_not_run_here_has_a_row_that_says_why() -> None:
    meta = torch.zeros(1, 1, 4, 2, device="meta", dtype=torch.float32)
    with pytest.raises(ValueError, match="is for NVIDIA GPUs") as caught:
        choose("triton", meta, CausalMask(4).logit_bias(4))
    row = failed("gradients", "l2, triton", caught.value)
    assert row.verdict == "not run"
    assert "it is for NVIDIA GPUs" in row.note
    assert failed("gradients", "l2, math", ValueError("wrong")).verdict == "FAIL"
