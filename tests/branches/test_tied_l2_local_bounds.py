"""Local bounds: never below the true constant, and close to it."""

import math
from dataclasses import replace

import pytest
import torch

from invformer.branches.tied_l2 import bounds as contractive
from invformer.branches.tied_l2 import local_bounds as local
from invformer.lipschitz.power_iteration import operator_norm
from invformer.numerics.lambert_w import phi_inverse_from_log
from invformer.numerics.linear_map import linearise
from tests.branches.attention_cases import MASKS, AttentionCase, attention_case, logit_bias
from tests.support.problems import dense_jacobian, of_one_layer

FROBENIUS_BOUNDS = {
    "fast": local.fast_local_bound,
    "tight": local.tight_local_bound,
    "comparison": local.comparison_local_bound,
}


def bank(mask: str, **sizes: int) -> list[AttentionCase]:
    """From diffuse attention to one-hot, Gaussian and clustered inputs."""
    return [
        attention_case(seed, scale=scale, clustered=clustered, mask=mask, **sizes)
        for seed, scale in enumerate((0.3, 1.0, 2.0, 3.0, 5.0))
        for clustered in (False, True)
    ]


def largest_singular_value(case: AttentionCase) -> float:
    return float(torch.linalg.matrix_norm(dense_jacobian(case.f, case.x), 2))


def token_max_witness(num_tokens: int = 101) -> AttentionCase:
    """D = 1: a query at 0, half the others at r, half at −r, r² = 1 + g: a gain near 4g + 1."""
    r = math.sqrt(1 + float(phi_inverse_from_log(torch.tensor(num_tokens - 1.0).log())))
    x = torch.zeros(num_tokens, 1)
    x[0 : num_tokens // 2], x[num_tokens // 2 : -1] = r, -r
    one = torch.ones(1, 1, 1)
    return AttentionCase(x, one, one, logit_bias("none", 1, num_tokens))


@pytest.mark.parametrize("mask", MASKS)
def test_frobenius_bounds_are_above_the_true_constant_and_close_to_it(mask: str) -> None:
    for case in bank(mask, num_tokens=12, d_model=8):
        true = largest_singular_value(case)
        fast, tight, comparison = (float(b(*case.weights)) for b in FROBENIUS_BOUNDS.values())
        assert true <= fast <= 6 * true
        assert true <= tight <= 2.8 * true
        assert true <= comparison


@pytest.mark.parametrize("mask", MASKS)
def test_token_max_estimate_local_bound_and_certificate_stand_in_this_order(mask: str) -> None:
    for case in bank(mask, num_tokens=12, d_model=8):
        estimate = operator_norm(linearise(case.f, case.x), "token_max", num_steps=20)
        bound = float(local.token_max_local_bound(*case.weights))
        log_mass = case.log_mass()
        certificate = of_one_layer(contractive.token_max_bounds, case.w_q, case.g, log_mass)
        assert float(estimate.value) <= bound <= certificate
        assert bound <= 6 * float(estimate.value)


def test_the_token_max_bound_is_the_norm_itself_on_the_witness() -> None:
    case = token_max_witness()
    row_sums = dense_jacobian(case.f, case.x).abs().sum(-1)
    bound = local.token_max_local_bound(*case.weights)
    torch.testing.assert_close(bound, row_sums.amax(), rtol=1e-9, atol=0)
    certificate = 4 * float(phi_inverse_from_log(torch.tensor(100.0).log())) + 1
    assert 0.87 * certificate < float(bound) < certificate


def test_bounds_hold_for_tight_clusters_far_from_the_origin() -> None:
    case = attention_case(8, num_tokens=8, d_model=8)
    far = replace(case, x=1e-5 * case.x + 1e4)
    near = replace(case, x=1e-5 * case.x)
    for bound in (*FROBENIUS_BOUNDS.values(), local.token_max_local_bound):
        torch.testing.assert_close(bound(*far.weights), bound(*near.weights), rtol=1e-6, atol=0)
        assert float(bound(*far.weights)) >= largest_singular_value(near) / 8**0.5


ALL_BOUNDS = {**FROBENIUS_BOUNDS, "token_max": local.token_max_local_bound}


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_bounds_are_per_sample(name: str) -> None:
    cases = bank("causal and relative", num_tokens=6, d_model=8)[:4]
    w_q, g = cases[0].w_q, cases[0].g
    batch = AttentionCase(torch.stack([c.x for c in cases]), w_q, g, cases[0].bias)
    together = ALL_BOUNDS[name](*batch.weights)
    assert together.shape == (4,)
    for i, case in enumerate(cases):
        alone = ALL_BOUNDS[name](*replace(case, w_q=w_q, g=g).weights)
        torch.testing.assert_close(together[i], alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_heads_that_are_alike_add_up(name: str) -> None:
    case = attention_case(0, num_tokens=6, d_model=8, num_heads=1, scale=2.0)
    alike = replace(case, w_q=case.w_q.expand(9, -1, -1), g=case.g.expand(9, -1, -1))
    one, nine = (ALL_BOUNDS[name](*c.weights) for c in (case, alike))
    torch.testing.assert_close(nine, 9 * one, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_single_precision_inputs_give_a_bound_in_double_rounded_outward(name: str) -> None:
    case = attention_case(9, mask="causal")
    rounded = [t.float() for t in case.weights]
    bound = ALL_BOUNDS[name](*rounded)
    exact = ALL_BOUNDS[name](*case.weights)
    assert bound.dtype == torch.float64
    assert exact <= bound <= exact * (1 + 1e-4)


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_nan_is_bounded_by_infinity(name: str) -> None:
    case = attention_case(9)
    broken = replace(case, x=torch.stack([case.x, torch.full_like(case.x, torch.nan)]))
    bound = ALL_BOUNDS[name](*broken.weights)
    assert bound[0].isfinite()
    assert bound[1] == torch.inf


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_a_single_token_and_silent_heads_are_no_special_case(name: str) -> None:
    case = attention_case(10, num_tokens=1, mask="causal")
    true = largest_singular_value(case)
    assert true * (1 - 1e-12) <= float(ALL_BOUNDS[name](*case.weights)) <= 2 * true
    silent = replace(case, g=torch.zeros_like(case.g))
    assert float(ALL_BOUNDS[name](*silent.weights)) <= 1e-12


def witnesses() -> list[AttentionCase]:
    """Inputs on which one term or another is nearly all there is."""
    one = torch.ones(1, 1, 1)
    two = AttentionCase(torch.tensor([[0.0], [1.2]]), one, one, logit_bias("none", 1, 2))
    three = AttentionCase(torch.tensor([[-2.0], [0.0], [2.0]]), one, one, logit_bias("none", 1, 3))
    hidden = AttentionCase(
        torch.tensor([[-2.0], [2.0], [0.0]]), one, one, logit_bias("causal", 1, 3)
    )
    same = attention_case(0, num_tokens=4, scale=0.01)
    same = replace(same, w_q=same.w_q[:1].expand(2, -1, -1), g=same.g[:1].expand(2, -1, -1))
    bias = logit_bias("causal", 1, 16)
    bias[..., 0] += 20  # draws every row to the first token: ‖P‖ is about √N
    drawn = AttentionCase(0.01 * torch.randn(16, 1), one, one, bias)
    return [token_max_witness(21), drawn, two, three, hidden, same]


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_no_bound_is_violated_by_a_witness(name: str) -> None:
    for case in witnesses():
        true = largest_singular_value(case)
        if name == "token_max":
            estimate = operator_norm(linearise(case.f, case.x), "token_max", num_steps=20)
            true = float(estimate.value)
        assert float(ALL_BOUNDS[name](*case.weights)) >= true * (1 - 1e-9)
