"""CUDA's rules on a processor: the defects that they bring to light, and only where they apply."""

import math

import pytest
import torch

from invformer.kernels.attention import choose
from invformer.numerics.l2_attention import l2_attention
from invformer.weights.position_bias import CausalMask
from tests.gpu.emulation import cuda_rules
from tests.gpu.machine import failed
from tests.support.host_syncs import waits


def test_sums_roots_and_norms_are_in_single_precision_under_autocast_alone() -> None:
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    with cuda_rules():
        assert x.sum().dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            for y in (x.sum(), torch.rsqrt(x), torch.linalg.vector_norm(x), x.softmax(-1)):
                assert y.dtype == torch.float32
            assert x.sum(dtype=torch.bfloat16).dtype == (x @ x).dtype == torch.bfloat16
            assert torch.addcmul(x.float(), x, x).dtype == torch.float32
            assert x.double().sum().dtype == torch.float64
            assert l2_attention(x, torch.full((4, 4), -math.inf).triu(1)).dtype == torch.bfloat16


def test_all_that_waits_for_a_device_is_seen() -> None:
    x = torch.arange(4.0)
    for wait in (
        x.tolist, x.cpu, x.numpy, x.sum().item, lambda: x[x > 1], lambda: x.equal(x), x.nonzero,
        lambda: torch.tensor([1.0]), lambda: x.masked_select(x > 1), lambda: bool((x > 0).all()),
        lambda: x.index_put((x > 1,), x.new_ones(())),
    ):  # fmt: skip
        with waits() as found:
            wait()
        assert len(found) == 1, (wait, found)
    with waits() as found:
        x.where(x > 1, 0).add_(1)[1:].sum()
    assert not found


def test_a_kernel_that_does_not_run_here_has_a_row_that_says_why() -> None:
    meta = torch.zeros(1, 1, 4, 2, device="meta", dtype=torch.float32)
    with pytest.raises(ValueError, match="is for NVIDIA GPUs") as caught:
        choose("triton", meta, CausalMask(4).logit_bias(4))
    row = failed("gradients", "l2, triton", caught.value)
    assert row.verdict == "not run"
    assert "it is for NVIDIA GPUs" in row.note
    assert failed("gradients", "l2, math", ValueError("wrong")).verdict == "FAIL"
