"""log|det(I + J)|: exact for causal maps, unbiased for the rest, held against dense matrices."""

import math
from collections.abc import Callable

import pytest
import torch

from invformer.numerics.l2_attention import l2_attention
from invformer.numerics.linear_map import LinearMap, linearise
from invformer.numerics.log_det import causal_log_det, log_det_estimate
from tests.numerics.contractions import orthogonal
from tests.problems import dense_jacobian


def causal_attention(heads: int = 2, width: int = 6) -> Callable[[torch.Tensor], torch.Tensor]:
    """Tied L2 attention: a causal map whose tokens do mix."""
    d = width // heads
    w_q = 0.8 * orthogonal(heads, width, width)[..., :d]
    g = 0.4 * orthogonal(heads, width, width)[:, :d]

    def f(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.full((1, x.shape[-2], x.shape[-2]), -math.inf).triu(1)
        return (l2_attention(x.unsqueeze(-3) @ w_q, hidden) @ g).sum(-3)

    return f


def matrix_jacobian(matrix: torch.Tensor, copies: int) -> LinearMap:
    """One matrix, acting on as many samples (N, D) = (n, 1)."""
    shape = torch.Size((copies, len(matrix), 1))
    return LinearMap(
        lambda v: matrix @ v, lambda v: matrix.mT @ v, shape, matrix.dtype, matrix.device
    )


def test_a_causal_log_det_is_the_dense_one_in_every_grad_mode() -> None:
    attention, w, x = causal_attention(), 0.5 * orthogonal(6, 6), torch.randn(6, 7, 6)

    def f(z: torch.Tensor) -> torch.Tensor:
        return torch.tanh((z + attention(z)) @ w)

    exact = torch.stack([(torch.eye(42) + dense_jacobian(f, sample)).logdet() for sample in x])
    for grad in (torch.enable_grad, torch.inference_mode):
        with grad():
            found = causal_log_det(f, x.view(2, 3, 7, 6).clone()).flatten()
            assert not found.requires_grad
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


def test_a_map_that_sees_the_future_is_refused() -> None:
    mixing = torch.full((5, 5), 0.1)
    with pytest.raises(ValueError, match="not causal: token 0 depends on later ones"):
        causal_log_det(lambda x: mixing @ x, torch.randn(2, 5, 3))


@pytest.mark.parametrize("c", [0.5, 0.95])
def test_the_estimate_is_unbiased_and_its_error_calibrated(c: float) -> None:
    """400 samples of the same problem: z-scores with mean 0, the claimed spread, one truth."""
    matrix = c * orthogonal(8, 8)
    truth = torch.linalg.slogdet(torch.eye(8) + matrix).logabsdet
    estimate = log_det_estimate(
        matrix_jacobian(matrix, 400), lipschitz_bound=c, num_probes=60, num_exact_terms=1,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    # One truncation serves the batch, so samples share that part of the error: ask for 4 sigma of a
    # single sample, and for calibration only within a factor of two.
    z = (estimate.value - truth) / estimate.standard_error
    assert z.mean().abs() < 4
    assert 0.5 < z.std() < 2


def test_more_probes_bring_the_estimate_to_the_exact_value_and_one_claims_no_error() -> None:
    f, x = causal_attention(), torch.randn(4, 6, 6)
    exact = causal_log_det(f, x)
    estimate = log_det_estimate(linearise(f, x), lipschitz_bound=0.8, num_probes=100)
    assert ((estimate.value - exact).abs() <= 4 * estimate.standard_error).all()
    assert (estimate.standard_error < 0.2).all()
    alone = log_det_estimate(linearise(f, x), lipschitz_bound=0.8, num_probes=1)
    assert alone.standard_error.isinf().all()


def test_a_constant_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        log_det_estimate(matrix_jacobian(torch.eye(3), 1), lipschitz_bound=1.0)
