"""log|det(I + J)|: exact for causal maps, unbiased for the rest, held against dense ones."""

import math

import pytest
import torch
from torch import Tensor

from invformer.numerics.linear_map import LinearMap, dense_jacobian, linearise
from invformer.numerics.log_det import (
    causal_log_det,
    diagonal_blocks,
    l2_attention_diagonal_blocks,
    log_det_estimate,
    log_det_of_blocks,
)
from tests.numerics.contractions import CausalL2, orthogonal


def causal_attention(heads: int = 2, width: int = 6) -> CausalL2:
    d = width // heads
    w_q = 0.8 * orthogonal(heads, width, width)[..., :d]
    return CausalL2(w_q, 0.4 * orthogonal(heads, width, width)[:, :d])


def feed_forward(width: int = 6, c: float = 0.8):
    w_in, w_out = orthogonal(width, width), orthogonal(width, width)
    return lambda x: c * torch.tanh(x @ w_in + 0.3) @ w_out


def dense_log_det(f, x: Tensor) -> Tensor:
    identity = torch.eye(x[0].numel())
    dense = [torch.linalg.slogdet(identity + dense_jacobian(f, sample)) for sample in x]
    assert all(d.sign > 0 for d in dense)
    return torch.stack([d.logabsdet for d in dense])


def matrix_jacobian(matrix: Tensor) -> LinearMap:
    """One matrix per sample, acting on the flattened (N, D) = (n, 1)."""
    return LinearMap(
        jvp=lambda v: matrix @ v,
        vjp=lambda v: matrix.mT @ v,
        shape=torch.Size([*matrix.shape[:-1], 1]),
        dtype=matrix.dtype,
        device=matrix.device,
    )


@pytest.mark.parametrize("make", [causal_attention, feed_forward])
def test_a_causal_log_det_is_the_dense_one(make) -> None:
    f, x = make(), torch.randn(3, 7, 6)
    torch.testing.assert_close(causal_log_det(f, x), dense_log_det(f, x), rtol=1e-11, atol=1e-12)


def test_a_composition_of_causal_maps_is_causal() -> None:
    attention, dense_layer = causal_attention(), feed_forward()
    x = torch.randn(2, 5, 6)

    def f(z: Tensor) -> Tensor:
        return dense_layer(z + attention(z))

    torch.testing.assert_close(causal_log_det(f, x), dense_log_det(f, x), rtol=1e-11, atol=1e-12)


def test_a_token_wise_map_needs_no_loop_over_tokens() -> None:
    calls = 0

    def f(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return layer(x)

    layer, x = feed_forward(), torch.randn(2, 3, 7, 6)
    fast = causal_log_det(f, x, token_wise=True)
    assert fast.shape == (2, 3)
    assert calls == 1
    torch.testing.assert_close(fast, causal_log_det(layer, x), rtol=1e-11, atol=1e-12)


def test_the_blocks_are_those_of_the_dense_jacobian() -> None:
    f, x = causal_attention(), torch.randn(5, 6)
    dense = dense_jacobian(f, x).reshape(5, 6, 5, 6)
    blocks = diagonal_blocks(f, x)
    for t in range(5):
        torch.testing.assert_close(blocks[t], dense[t, :, t, :], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_closed_form_of_l2_attention_is_the_derivative(dtype: torch.dtype) -> None:
    f, x = causal_attention(heads=3), torch.randn(2, 9, 6)
    q = torch.einsum("...na,had->...hnd", x, f.w_q)
    arguments = (q, f.weights(q), f.w_q, f.g)
    closed = l2_attention_diagonal_blocks(*(a.to(dtype) for a in arguments)).double()
    accuracy = 1e-11 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(closed, diagonal_blocks(f, x), rtol=accuracy, atol=accuracy)
    torch.testing.assert_close(
        log_det_of_blocks(closed), dense_log_det(f, x), rtol=accuracy, atol=10 * accuracy
    )


def test_a_map_that_sees_the_future_is_refused() -> None:
    mixing = torch.full((5, 5), 0.1)
    with pytest.raises(ValueError, match="not causal: token 0 depends on later ones"):
        causal_log_det(lambda x: mixing @ x, torch.randn(2, 5, 3))


def test_a_false_promise_of_token_wise_is_refused() -> None:
    with pytest.raises(ValueError, match="mixes tokens"):
        causal_log_det(causal_attention(), torch.randn(2, 5, 6), token_wise=True)


def test_it_works_in_inference_mode_and_leaves_no_graph() -> None:
    f, x = causal_attention(), torch.randn(2, 4, 6, requires_grad=True)
    expected = causal_log_det(f, x)
    assert not expected.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(causal_log_det(f, x), expected)


@pytest.mark.parametrize("c", [0.5, 0.95])
def test_the_estimate_is_unbiased_and_its_error_calibrated(c: float) -> None:
    """400 samples of the same problem: z-scores with mean 0, the claimed spread, one truth."""
    matrix = c * orthogonal(8, 8)
    truth = torch.linalg.slogdet(torch.eye(8) + matrix).logabsdet
    estimate = log_det_estimate(
        matrix_jacobian(matrix.expand(400, 8, 8)),
        lipschitz_bound=c,
        num_probes=60,
        num_exact_terms=1,
        generator=torch.Generator().manual_seed(1),
    )
    # One truncation serves the batch, so samples share that part of the error: ask for 4 sigma of a
    # single sample, and for calibration only within a factor of two.
    z = (estimate.value - truth) / estimate.standard_error
    assert z.mean().abs() < 4
    assert 0.5 < z.std() < 2


def test_more_probes_bring_it_to_the_exact_value() -> None:
    f, x = causal_attention(), torch.randn(4, 6, 6)
    exact = causal_log_det(f, x)
    estimate = log_det_estimate(linearise(f, x), lipschitz_bound=0.8, num_probes=100)
    assert ((estimate.value - exact).abs() <= 4 * estimate.standard_error).all()
    assert (estimate.standard_error < 0.2).all()
    assert estimate.num_terms >= 100 * 8


def test_a_fixed_truncation_would_be_biased_where_the_estimate_is_not() -> None:
    c, n = 0.9, 6
    jacobian = matrix_jacobian((-c * torch.eye(n)).expand(200, n, n))
    truth = n * math.log(1 - c)
    truncated = -n * sum(c**k / k for k in range(1, 4))
    estimate = log_det_estimate(jacobian, lipschitz_bound=c, num_probes=1000, num_exact_terms=3)
    # Signs square to one: all that is random here is the truncation, the same for every sample.
    assert (estimate.value - truth).abs().max() < 4 * estimate.standard_error.max()
    assert abs(truncated - truth) > 10 * estimate.standard_error.max()


def test_a_symmetric_sign_probe_is_exact_on_diagonal_jacobians() -> None:
    diagonal = torch.diag(torch.tensor([0.3, -0.2, 0.1]))
    estimate = log_det_estimate(
        matrix_jacobian(diagonal.expand(2, 3, 3)),
        lipschitz_bound=0.3,
        num_probes=3,
        num_exact_terms=40,
    )
    expected = torch.log1p(diagonal.diagonal()).sum()
    torch.testing.assert_close(estimate.value, expected.expand(2), rtol=1e-12, atol=1e-12)


def test_one_probe_claims_no_standard_error() -> None:
    jacobian = matrix_jacobian(0.5 * torch.eye(3).expand(2, 3, 3))
    assert (
        log_det_estimate(jacobian, lipschitz_bound=0.5, num_probes=1).standard_error.isinf().all()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lipschitz_bound": 1.0}, r"must be in \[0, 1\)"),
        ({"num_probes": 0}, "at least 1"),
        ({"num_exact_terms": 0}, "at least 1"),
    ],
)
def test_impossible_numbers_are_refused(change: dict, message: str) -> None:
    jacobian = matrix_jacobian(0.5 * torch.eye(3))
    with pytest.raises(ValueError, match=message):
        log_det_estimate(jacobian, **{"lipschitz_bound": 0.5, **change})
