"""Dot-product attention: its Jacobian, its bounds on balls, and the inputs that come close."""

import math
import sys
from collections.abc import Iterator
from typing import Literal

import mpmath
import pytest
import torch
from torch import Tensor

from invformer.bounds import castin
from invformer.numerics import l2_attention as core
from invformer.numerics.linear_map import LinearMap, dense_jacobian

N, D = 5, 3


@pytest.fixture(autouse=True)
def _many_digits() -> Iterator[None]:
    with mpmath.workdps(60):
        yield


def causal(num_tokens: int = N) -> Tensor:
    return torch.ones(num_tokens, num_tokens).tril().bool()


VARIANTS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "masked": {"visible": causal()},
    "weighted": {"mass": torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05])},
    "biases": {"shift": torch.tensor([0.5, -1.0, 2.0])},
    "all": {
        "visible": causal(),
        "mass": torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05]),
        "shift": torch.tensor([0.5, -1.0, 2.0]),
    },
}


def variant(name: str) -> dict[str, Tensor]:
    return {k: v if v.dtype == torch.bool else v.double() for k, v in VARIANTS[name].items()}


def attention(x: Tensor, a: Tensor, v: Tensor, **options: Tensor) -> Tensor:
    return castin.dot_product_weights(x, a, **options) @ x @ v.mT


def local_constant(x: Tensor, a: Tensor, v: Tensor, **options: Tensor) -> float:
    return float(
        torch.linalg.matrix_norm(dense_jacobian(lambda z: attention(z, a, v, **options), x), 2)
    )


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def tokens_in_ball(num_tokens: int, radius: float) -> Tensor:
    """Half of them on the sphere."""
    x = torch.randn(num_tokens, D)
    length = radius * torch.rand(num_tokens, 1).round().clamp_min(0.3)
    return x / x.norm(dim=-1, keepdim=True) * length


def problems(count: int) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Tokens in a ball, A and V of many sizes."""
    for i in range(count):
        radius = 10 ** (i / count * 1.5 - 0.75)
        x = tokens_in_ball(2 + i % 7, radius)
        if i % 3 == 0:
            x[1:] = x[1]  # two clusters
        yield x, torch.randn(D, D) * (1 + i % 2), torch.randn(D, D), radius


@pytest.mark.parametrize("name", VARIANTS)
def test_the_weights_are_those_of_a_naive_loop(name: str) -> None:
    x, a, options = torch.randn(N, D), torch.randn(D, D), variant(name)
    p = torch.zeros(N, N)
    for i in range(N):
        for j in range(N):
            if bool(options.get("visible", torch.ones(N, N))[i, j]):
                logit = x[j] @ (a @ x[i] + options.get("shift", torch.zeros(D)))
                p[i, j] = options.get("mass", torch.ones(N))[j] * logit.exp()
        p[i] /= p[i].sum()
    torch.testing.assert_close(castin.dot_product_weights(x, a, **options), p)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_analytic_jacobian_agrees_with_automatic_differentiation(name: str) -> None:
    x, a, v, options = torch.randn(2, N, D), torch.randn(D, D), torch.randn(D, D), variant(name)
    p = castin.dot_product_weights(x, a, **options)
    jacobian: LinearMap = castin.dot_product_jacobian(x, p, a, v, options.get("shift"))
    dx, g = torch.randn_like(x), torch.randn_like(x)
    for i in range(2):
        dense = dense_jacobian(lambda z: attention(z, a, v, **options), x[i])
        torch.testing.assert_close(jacobian.jvp(dx)[i].flatten(), dense @ dx[i].flatten())
        torch.testing.assert_close(jacobian.vjp(g)[i].flatten(), dense.mT @ g[i].flatten())


def test_the_jacobian_is_the_formula_of_lemma_c2() -> None:
    x, a, v, e = torch.randn(N, D), torch.randn(D, D), torch.randn(D, D), torch.randn(N, D)
    p = castin.dot_product_weights(x, a)
    rows = []
    for i in range(N):
        offset = x - p[i] @ x
        covariance = (offset.mT * p[i]) @ offset
        key = sum(p[i, j] * offset[j] * ((a @ x[i]) @ e[j]) for j in range(N))
        rows.append(v @ (p[i] @ e + covariance @ a @ e[i] + key))
    pushed = castin.dot_product_jacobian(x, p, a, v).jvp(e)
    torch.testing.assert_close(pushed, torch.stack(rows))


def test_only_the_query_bias_matters() -> None:
    x, q, k = torch.randn(N, D), torch.randn(2, D), torch.randn(2, D)
    b_q, b_k = torch.randn(2), torch.randn(2)
    logits = (x @ q.mT + b_q) @ (x @ k.mT + b_k).mT / math.sqrt(2)
    shift = k.mT @ b_q / math.sqrt(2)
    p = castin.dot_product_weights(x, k.mT @ q / math.sqrt(2), shift=shift)
    torch.testing.assert_close(p, logits.softmax(-1))


def test_ball_bounds_hold_masked_and_not_and_the_triangle_form_is_smaller() -> None:
    closest = 0.0
    for x, a, v, radius in problems(60):
        n = len(x)
        paper, triangle = (
            castin.ball_bound(norm(a), norm(v), radius, n, form) for form in ("paper", "triangle")
        )
        assert triangle <= paper
        diameter = float(castin.diameter_bound(x, a, v))
        for options in ({}, {"visible": causal(n)}):
            true = local_constant(x, a, v, **options)
            assert true <= triangle
            assert true <= diameter
            closest = max(closest, true / triangle)
    assert closest > 0.4


def test_the_ball_bound_with_biases_holds_and_reduces_to_the_one_without() -> None:
    for x, a, v, radius in problems(40):
        shift = 3 * torch.randn(D)
        bound = castin.bias_ball_bound(norm(a), norm(v), float(shift.norm()), radius, len(x))
        assert local_constant(x, a, v, shift=shift) <= bound
        without = castin.bias_ball_bound(norm(a), norm(v), 0.0, radius, len(x))
        assert math.isclose(
            without, castin.ball_bound(norm(a), norm(v), radius, len(x), "paper"), rel_tol=1e-12
        )


def test_the_rate_is_taken_from_real_eigenvalues_only() -> None:
    rotation = torch.tensor([[0.0, -5.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, -0.25]])
    assert castin.two_cluster_rate(rotation) == pytest.approx(0.25)
    assert castin.two_cluster_rate(torch.diag(torch.tensor([4.0, -0.25]))) == pytest.approx(0.5)
    assert castin.two_cluster_rate(torch.diag(torch.tensor([1.0, -0.25]))) == pytest.approx(0.25)
    assert castin.two_cluster_rate(rotation[:2, :2]) == 0
    with pytest.raises(ValueError, match="no real eigenvalue"):
        castin.two_cluster_tokens(rotation[:2, :2], 1.0, 4)


@pytest.mark.parametrize(
    ("radius", "num_tokens", "true", "lower"), [(1.5, 30, 8.829, 8.539), (2.0, 100, 12.13, 12.11)]
)
def test_two_clusters_reach_the_lower_bound(
    radius: float, num_tokens: int, true: float, lower: float
) -> None:
    a, one = -torch.ones(1, 1), torch.ones(1, 1)
    x = castin.two_cluster_tokens(a, radius, num_tokens)
    rate = castin.two_cluster_rate(a)
    measured = local_constant(x, a, one)
    assert measured == pytest.approx(true, abs=0.01)
    sharper = castin.two_cluster_lower_bound(rate, radius, num_tokens)
    assert sharper == pytest.approx(lower, abs=0.01)
    assert castin.two_cluster_lower_bound(rate, radius, num_tokens, "paper") <= sharper <= measured
    assert measured <= castin.ball_bound(1.0, 1.0, radius, num_tokens)


@pytest.mark.parametrize("eigenvalues", [(2.0, 0.5), (0.5, -1.0), (2.0, -0.1)])
def test_the_lower_bound_is_below_the_true_constant_of_its_tokens(
    eigenvalues: tuple[float, float],
) -> None:
    basis = torch.linalg.qr(torch.randn(2, 2)).Q
    a = basis @ torch.diag(torch.tensor(eigenvalues)) @ basis.mT
    rate = castin.two_cluster_rate(a)
    for radius in (0.5, 1.0, 2.0):
        for n in (2, 5, 20, 60):
            x = castin.two_cluster_tokens(a, radius, n)
            assert (x.norm(dim=-1) <= radius * (1 + 1e-12)).all()
            true = local_constant(x, a, torch.eye(2))
            assert castin.two_cluster_lower_bound(rate, radius, n) <= true


def test_the_attack_grows_like_root_n_with_dot_products_and_not_with_tied_distances() -> None:
    identity = torch.eye(4)
    dot, tied = [], []
    for n in (4, 16, 64):
        x = castin.two_cluster_tokens(-identity, 2.0, n)
        dot.append(local_constant(x, -identity, identity))
        dense = dense_jacobian(lambda z: 2 * core.l2_attention(z[None])[0], x)
        tied.append(norm(dense) / 2)
    assert dot[2] / dot[0] > 0.8 * 4
    assert max(tied) < 3


def test_the_constant_at_fixed_length_grows_with_the_square_of_the_radius() -> None:
    one = torch.ones(1, 1)
    x = torch.tensor([[0.0], [30.0], [-30.0]])
    assert local_constant(x, one, one) == pytest.approx(600.3335, abs=1e-4)


def test_mean_field_bounds_hold_for_weighted_measures() -> None:
    closest = 0.0
    for i in range(80):
        radius = 0.2 + 1.3 * (i / 80)
        x, a, v = tokens_in_ball(2 + i % 3, radius), torch.randn(D, D), torch.randn(D, D)
        if i % 2:
            x, a = x[:2], -torch.eye(D)
            x[1] = -x[0]
        mass = torch.rand(len(x)).pow(4).clamp_min(1e-3)
        found = castin.mass_splitting(x, mass / mass.sum(), a, v)
        paper, triangle = (
            castin.mean_field_bound(norm(a), norm(v), radius, form=form)
            for form in ("paper", "triangle")
        )
        assert found.value <= triangle <= paper
        closest = max(closest, float(found.value) / triangle)
    assert closest > 0.5


@pytest.mark.parametrize(("num_tokens", "cesaro"), [(2, 1.144), (100, 1.630)])
def test_the_masked_mean_field_bound_needs_its_factor_two(num_tokens: int, cesaro: float) -> None:
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    x = torch.randn(num_tokens, 1)
    true = local_constant(x, zero, one, visible=causal(num_tokens))
    assert true == pytest.approx(cesaro, abs=1e-3)
    unmasked = castin.mean_field_bound(0.0, 1.0, 1.0, form="paper")
    assert unmasked < true <= castin.mean_field_bound(0.0, 1.0, 1.0, masked=True)


@pytest.mark.parametrize(
    ("eigenvalue", "radius", "ratio"),
    [
        (-1.0, 2.0, 1.25),
        (-1.0, 4.0, 1.063),
        (-1.0, 6.0, 1.028),
        (1.0, 6.0, 1.22),
        (1.0, 8.0, 1.125),
    ],
)
def test_two_diracs_reach_the_mean_field_growth(
    eigenvalue: float, radius: float, ratio: float
) -> None:
    a, one = torch.full((1, 1), eigenvalue), torch.ones(1, 1)
    x, mass = castin.two_dirac_measure(a, radius)
    found = castin.mass_splitting(x, mass, a, one)
    size = castin.mean_field_growth(castin.two_cluster_rate(a), radius)
    assert float(found.moving) / size == pytest.approx(ratio, abs=0.006)
    assert float(found.value) <= castin.mean_field_bound(1.0, 1.0, radius)


def exact_mean_field_bound(bend: float, masked: bool, form: castin.Form) -> mpmath.mpf:
    b = mpmath.mpf(bend)
    growth = (2 if masked else 1) * mpmath.exp(2 * b)
    return growth * (1 + 3 * b) if form == "paper" else b + growth * (1 + 2 * b)


@pytest.mark.parametrize("form", ["paper", "triangle"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_mean_field_bound_that_leaves_the_format_is_inf(masked: bool, form: castin.Form) -> None:
    for bend in (0.1, 100.0, 350.0):
        bound = castin.mean_field_bound(bend, 1.0, 1.0, masked=masked, form=form)
        exact = exact_mean_field_bound(bend, masked, form)
        assert exact <= bound <= exact * (1 + mpmath.mpf("1e-12"))
    for norm_a, radius in [(354.5, 1.0), (1e9, 1e9), (1.0, 1e200), (math.inf, 1.0), (1.0, 1e308)]:
        for norm_v in (0.0, 1.0):
            bound = castin.mean_field_bound(norm_a, norm_v, radius, masked=masked, form=form)
            assert bound == math.inf


@pytest.mark.parametrize("radius", [1e100, 1e200, 1e308])
def test_ball_bounds_that_leave_the_format_are_inf(radius: float) -> None:
    assert castin.ball_bound(1.0, 1.0, radius, 5, "paper") == math.inf
    assert castin.bias_ball_bound(1.0, 1.0, 1.0, radius, 5) == math.inf
    assert castin.ball_bound(1.0, 1.0, radius, 5) >= 2 * min(radius * radius, sys.float_info.max)
    assert castin.ball_bound(0.0, 1.0, radius, 4) == pytest.approx(2)  # a constant mean, any R


def test_what_is_reached_from_below_stays_finite_and_below() -> None:
    for exponent in (1e-3, 1.0, 300.0, 700.0):
        size = castin.mean_field_growth(exponent, 1.0)
        exact = mpmath.mpf(exponent) / 2 * mpmath.exp(mpmath.mpf(exponent))
        assert exact * (1 - mpmath.mpf("1e-10")) <= size <= exact
    for rate, radius in [(705.0, 1.0), (1.0, 40.0), (1.0, 1e200), (1e300, 1e300)]:
        exact = mpmath.mpf(rate) * radius**2 if radius < 1e100 else mpmath.mpf(1e6)
        size = castin.mean_field_growth(rate, radius)
        assert 0.99 * sys.float_info.max < size <= exact / 2 * mpmath.exp(exact)
        assert size <= sys.float_info.max
    assert castin.mean_field_growth(0.0, 1e200) == 0


@pytest.mark.parametrize("form", ["paper", "sharper"])
@pytest.mark.parametrize(
    ("rate", "radius"), [(0.5, 1.0), (1.0, 19.0), (1.0, 40.0), (1.0, 1e200), (1e-320, 1e160)]
)
def test_the_lower_bound_by_two_clusters_is_below_its_formula_at_any_radius(
    rate: float, radius: float, form: Literal["paper", "sharper"]
) -> None:
    exponent = 2 * mpmath.mpf(rate) * mpmath.mpf(radius) ** 2
    others = 9 * mpmath.exp(-exponent) if exponent < 1e6 else mpmath.mpf(0)
    exact = 3 / (1 + others)
    if form == "sharper":
        exact *= 1 + exponent * others / (1 + others)
    bound = castin.two_cluster_lower_bound(rate, radius, 10, form)
    assert exact * (1 - mpmath.mpf("1e-10")) <= bound <= exact


@pytest.mark.parametrize("radius", [0.5, 4.0, 18.0, 30.0, 1e200])
def test_two_diracs_have_masses_that_sum_to_one_at_any_radius(radius: float) -> None:
    _, mass = castin.two_dirac_measure(-torch.eye(2), radius)
    assert mass.sum() == 1
    assert mass[1] > 0.5
    expected = mpmath.exp(-2 * mpmath.mpf(radius) ** 2) if radius < 100 else mpmath.mpf(0)
    assert float(mass[0]) == pytest.approx(float(expected / (1 + expected)), rel=1e-12)


def test_far_out_every_token_follows_one_other() -> None:
    x, a, v = torch.randn(8, D), torch.randn(D, D), torch.randn(D, D)
    for options in ({}, {"visible": causal(8)}):
        limit = float(castin.large_radius_limit(x, a, v, **options))
        assert local_constant(200 * x, a, v, **options) == pytest.approx(limit, rel=1e-6)
        assert limit <= castin.large_radius_bound(norm(v), 8) * (1 + 1e-5)


def test_the_multi_head_lemma_holds_and_is_exact_for_heads_that_do_not_meet() -> None:
    x, heads = torch.randn(N, D), [(torch.randn(D, D), torch.randn(D, D)) for _ in range(3)]
    w = torch.randn(3, D, D)

    def f(z: Tensor) -> Tensor:
        return sum((attention(z, a, v) @ w[h].mT for h, (a, v) in enumerate(heads)), 0 * z)

    constants = torch.tensor([local_constant(x, a, v) for a, v in heads])
    bound = castin.multi_head_bound(w, constants)
    assert norm(dense_jacobian(f, x)) <= bound
    assert bound <= (torch.linalg.matrix_norm(w, 2) * constants).sum() * (1 + 1e-5)
    apart = torch.eye(6).unflatten(1, (3, 2)).transpose(0, 1)
    torch.testing.assert_close(
        castin.multi_head_bound(apart, torch.tensor([3.0, 4.0, 0.0])),
        torch.tensor(5.0),
        rtol=1e-6,
        atol=0,
    )


def test_mass_splitting_is_the_constant_of_the_measure_with_duplicated_atoms() -> None:
    for i in range(20):
        x, a, v = torch.randn(3, 2), 2 * torch.randn(2, 2), torch.randn(2, 2)
        mass = torch.rand(3) + 0.05
        mass = mass / mass.sum()
        found = castin.mass_splitting(x, mass, a, v)
        share = torch.tensor([0.3, 0.7]) if i % 2 else torch.tensor([0.5, 0.5])
        doubled = castin.mass_splitting(
            x.repeat_interleave(2, 0), (mass[:, None] * share).flatten(), a, v
        )
        torch.testing.assert_close(doubled.moving, found.value)
        torch.testing.assert_close(found.value, torch.maximum(found.moving, found.splitting))


def test_moving_atoms_of_equal_mass_is_the_ordinary_jacobian() -> None:
    x, a, v = torch.randn(N, D), torch.randn(D, D), torch.randn(D, D)
    found = castin.mass_splitting(x, torch.full((N,), 1 / N), a, v)
    assert float(found.moving) == pytest.approx(local_constant(x, a, v))


def test_splitting_an_atom_can_beat_every_motion_of_the_atoms() -> None:
    a, one = -torch.ones(1, 1), torch.ones(1, 1)
    wins = 0
    for second in torch.linspace(-4, 4, 17):
        for third in torch.linspace(-4, 4, 17):
            x = torch.stack([torch.tensor(4.0), second, third])[:, None]
            found = castin.mass_splitting(x, torch.full((3,), 1 / 3), a, one)
            wins += int(found.splitting > found.moving * (1 + 1e-9))
    assert 0 < wins < 30


def test_a_diameter_whose_square_leaves_float64_bounds_nothing() -> None:
    x, a, v = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(3, 3), torch.randn(3, 3)
    x[1] *= 1e155
    bound = castin.diameter_bound(x, a, v)
    assert bound[0] < math.inf
    assert bound[1] == math.inf
