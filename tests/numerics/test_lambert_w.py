"""Lambert W and the gains made of it, against mpmath, finite differences and the lemma."""

import math

import mpmath
import pytest
import torch
from torch import Tensor

from invformer.numerics.lambert_w import (
    causal_gain_from_log,
    causal_gain_upper,
    phi_inverse_from_log,
    phi_inverse_upper,
)

MASSES = [0.0, 1e-300, 1e-20, 1e-3, 0.5, 1.0, 7.0, 255.0, 1e6, 1e40, 1e300]


def true_w0(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.lambertw(x).real


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_both_gains_agree_with_mpmath_also_beyond_the_range_of_n(dtype: torch.dtype) -> None:
    log_n = torch.cat([torch.linspace(-69, 69, 70), torch.tensor([-1000, -300, 1000, 1e6])])
    log_n = log_n.to(dtype)
    with mpmath.workdps(50):
        w0 = [
            torch.tensor([float(true_w0(mpmath.exp(x - k))) for x in log_n.tolist()])
            for k in (1, 1.5)
        ]
    close = {"rtol": 200 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).tiny}
    torch.testing.assert_close(phi_inverse_from_log(log_n).double(), w0[0], **close)
    torch.testing.assert_close(causal_gain_from_log(log_n).double(), 1 + 2 * w0[1], **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_that_sees_nobody_else_has_gap_zero_and_finite_gradients(dtype: torch.dtype) -> None:
    log_n = torch.tensor(-math.inf, dtype=dtype, requires_grad=True)
    assert phi_inverse_from_log(log_n) == 0
    assert causal_gain_from_log(log_n) == 1
    assert torch.autograd.grad(phi_inverse_from_log(log_n), log_n)[0] == 0


def test_derivatives_of_first_and_second_order_are_exact() -> None:
    log_n = torch.tensor([-9.0, -1.0, 0.0, 2.0, 6.0], requires_grad=True)
    for function in (phi_inverse_from_log, causal_gain_from_log):
        assert torch.autograd.gradcheck(function, log_n)
        assert torch.autograd.gradgradcheck(function, log_n)


def test_the_lemma_is_attained_and_never_exceeded() -> None:
    """max_s Σ P s = g(n) with weights ∝ e^{b − s} and a self token ∝ 1, at s = 1 + g."""
    biases = torch.tensor([0.5, -1.0, 2.0, 0.0])
    g = phi_inverse_from_log(biases.logsumexp(0))

    def mean_gap(s: Tensor) -> Tensor:
        weights = torch.nn.functional.pad(biases - s, (1, 0)).softmax(-1)[..., 1:]
        return (weights * s).sum(-1)

    torch.testing.assert_close(mean_gap((1 + g).expand(4)), g)
    assert (mean_gap(10 * torch.rand(20000, 4)) <= g).all()


def test_the_rounded_up_forms_are_above_the_truth_and_close() -> None:
    with mpmath.workdps(50):
        for n in [*MASSES, *(10 ** (k / 40 - 5) for k in range(600))]:
            gap = true_w0(mpmath.mpf(n) / mpmath.e)
            kappa = 1 + 2 * true_w0(mpmath.mpf(n) * mpmath.exp(mpmath.mpf(-1.5)))
            log_n = math.nextafter(math.log(n), math.inf) if n else -math.inf
            assert gap <= phi_inverse_upper(log_n) <= gap * (1 + mpmath.mpf(1e-13)) + 1e-300
            assert kappa <= causal_gain_upper(log_n) <= kappa * (1 + mpmath.mpf(1e-13))
        for log_n in (-5000.0, -690.0, -3.0, 0.0, 8.0, 2e4, 1e17):
            gap = true_w0(mpmath.exp(mpmath.mpf(log_n) - 1))
            upper = phi_inverse_upper(log_n)
            assert gap <= upper <= gap * (1 + mpmath.mpf(1e-12)) + 1e-300


def test_nan_and_infinity_get_an_infinite_bound_and_no_mass_the_least_one() -> None:
    for unknown in (math.inf, math.nan):
        assert phi_inverse_upper(unknown) == causal_gain_upper(unknown) == math.inf
    assert (phi_inverse_upper(-math.inf), causal_gain_upper(-math.inf)) == (0, 1)
