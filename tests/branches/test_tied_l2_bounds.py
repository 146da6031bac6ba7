"""Certificates and local bounds of tied L2 attention: Jacobians, witnesses, ascent."""

import math
from dataclasses import replace
from functools import partial

import mpmath
import pytest
import torch
from hypothesis import given, settings

from invformer.branches.tied_l2 import bounds as contractive
from invformer.branches.tied_l2 import local_bounds as local
from invformer.branches.tied_l2.bounds import diagonal_gains, phi_inverses
from invformer.numerics.l2_attention import attention_weights
from invformer.numerics.lambert_w import phi_inverse_from_log
from invformer.weights.position_bias import RelativePositionBias
from tests.support.problems import (
    AttentionProblem,
    attention_problems,
    best_two_sided_gap,
    diagonal_norm,
    norm_from_below,
    of_one_layer,
    plain_bias,
    random_problem,
    two_headed_problem,
    two_sided_gain,
    two_sided_problem,
)

token_max_bound = partial(of_one_layer, contractive.token_max_bounds)
frobenius_bound = partial(of_one_layer, contractive.frobenius_bounds)
entry_max_bound = partial(of_one_layer, contractive.entry_max_bounds)
causal_bound = partial(of_one_layer, contractive.causal_bounds)


def log_mass_of(num_tokens: int) -> torch.Tensor:
    """log n without a bias."""
    return torch.tensor([num_tokens - 1.0]).log()


@given(attention_problems)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_dense_jacobian_exceeds_a_certificate(problem: AttentionProblem) -> None:
    jac = problem.jacobian()
    w_q, g, log_mass = problem.w_q, problem.g, problem.log_mass()
    assert norm_from_below(jac, "token_max") <= token_max_bound(w_q, g, log_mass)
    assert norm_from_below(jac, "entry_max") <= entry_max_bound(w_q, g, log_mass)
    assert diagonal_norm(jac) <= causal_bound(w_q, g, log_mass)
    assert norm_from_below(jac, "frobenius") <= frobenius_bound(w_q, g, problem.log_mass_per_row())


@pytest.mark.parametrize(
    ("num_heads", "d_head", "bias"), [(1, 1, 0.0), (1, 4, 0.0), (4, 3, 0.0), (2, 2, 2.0)]
)
def test_a_witness_reaches_85_percent_of_a_bound(num_heads: int, d_head: int, bias: float) -> None:
    """One head excited: gain 4g + 1 − 2g/(1 + g) at s = 1 + g, a little more at the best s."""
    n = 254 * math.exp(bias)
    problem = two_sided_problem(255, best_two_sided_gap(n), num_heads, d_head, bias=bias)
    bound = token_max_bound(problem.w_q, problem.g, problem.log_mass())
    attained = norm_from_below(problem.last_row(), "token_max")
    assert 0.85 * bound <= attained <= bound
    norms = torch.linalg.matrix_norm(problem.w_q[0], 2) * torch.linalg.matrix_norm(problem.g[0], 2)
    assert attained / norms.item() == pytest.approx(two_sided_gain(n, best_two_sided_gap(n)))


@pytest.mark.parametrize(("num_heads", "d_head", "bias"), [(1, 1, 0.0), (3, 4, 0.0), (2, 2, 2.0)])
def test_a_witness_attains_the_causal_certificate(num_heads: int, d_head: int, bias: float) -> None:
    """All logit gaps at 3/2 + W₀(n e^{−3/2}), the other tokens symmetric: equality."""
    log_mass = torch.tensor([math.log(64) + bias])
    (kappa,) = diagonal_gains(log_mass, 1)
    problem = two_sided_problem(65, 1 + kappa / 2, num_heads, d_head, bias=bias)
    block = problem.last_row()[0, :, -1]
    attained = torch.linalg.matrix_norm(block, 2).item()
    bound = causal_bound(problem.w_q, problem.g, problem.log_mass())
    assert (1 - 1e-8) * bound <= attained <= bound


def test_two_heads_that_look_at_different_tokens_need_the_root_of_their_number() -> None:
    problem, gain = two_headed_problem(200)
    bound = token_max_bound(problem.w_q, problem.g, problem.log_mass_per_row()[:, -1])
    attained = norm_from_below(problem.last_row(), "token_max")
    assert attained == pytest.approx(gain)
    assert bound / math.sqrt(2) < attained <= bound


def test_heads_that_cancel_at_one_input_do_not_cancel_at_all() -> None:
    """Σ_h W^Q_h G_h = 0, and the second head sees only the token itself."""
    w_q, g, bias = torch.ones(2, 1, 1), torch.tensor([[[1.0]], [[-1.0]]]), plain_bias(2, 2, True)
    bias[1, 1, 0] = -math.inf
    attained = AttentionProblem(torch.zeros(2, 1), w_q, g, bias).jacobian()
    assert 0 < norm_from_below(attained, "token_max") <= token_max_bound(w_q, g, log_mass_of(2))


def test_the_mass_of_the_fullest_row_counts_and_not_the_mean() -> None:
    problem = two_sided_problem(1001, best_two_sided_gap(1000))
    rows = problem.log_mass_per_row()
    attained = norm_from_below(problem.last_row(), "token_max")
    assert token_max_bound(problem.w_q, problem.g, rows.exp().mean().sqrt().log()[None]) < attained
    assert attained <= token_max_bound(problem.w_q, problem.g, rows.amax(-1))


@pytest.mark.parametrize(
    ("num_tokens", "gap", "preference", "least"),
    [
        # X = 0, the first token preferred tenfold: J is P, of norm about √N; K is κ √N.
        (50, 0.0, math.log(10), math.sqrt(50) * 10 / 11),
        # A first token at distance s, preferred by e^s, so that P_i0 = 1/2: ∂Y_i/∂q_0 is (1 − s)/2.
        # s is large beside √κ, so the gains of rows must be squared before they are summed.
        (6, 40.0, 40.0, math.sqrt(5) * 39 / 2),
    ],
)
def test_one_token_that_every_row_attends_to_moves_them_all(
    num_tokens: int, gap: float, preference: float, least: float
) -> None:
    one, x = torch.ones(1, 1, 1), torch.zeros(num_tokens, 1)
    x[0] = math.sqrt(gap)
    bias = torch.full((1, num_tokens, num_tokens), -math.inf)
    bias[0, :, 0] = preference
    bias[0].fill_diagonal_(0)
    problem = AttentionProblem(x, one, one, bias)
    attained = norm_from_below(problem.jacobian(), "frobenius")
    bound = frobenius_bound(one, one, problem.log_mass_per_row())
    assert least <= attained <= bound < 7 * attained


def test_heads_that_write_nothing_cost_nothing() -> None:
    w_q, g = torch.randn(4, 8, 2), torch.randn(4, 2, 8)
    g[1:] = 0
    for bound in (token_max_bound, causal_bound):
        alone = bound(w_q[:1], g[:1], log_mass_of(10))
        assert bound(w_q, g, log_mass_of(10)) == pytest.approx(alone, rel=1e-6)
    assert token_max_bound(w_q, 0 * g, log_mass_of(10)) == pytest.approx(0, abs=1e-300)


@pytest.mark.parametrize("bias", [-1e7, 3.0, 1e7])
def test_the_gap_of_a_large_position_bias_is_not_below_the_exact_one(bias: float) -> None:
    position = RelativePositionBias(1, 1024)
    table = position.table.data.fill_(bias)
    (u,) = phi_inverses(position.log_mass_per_row()[:, -1], 1)
    with mpmath.workdps(40):
        mass = mpmath.fsum(mpmath.exp(b) for b in table[0].tolist())
        assert u + mpmath.log(u) + 1 >= mpmath.log(mass)


@pytest.mark.parametrize("where", ["w_q", "g", "bias"])
def test_weights_that_are_not_finite_get_an_infinite_bound(where: str) -> None:
    w_q, g, rows = torch.randn(2, 4, 2), torch.randn(2, 2, 4), torch.zeros(2, 5)
    {"w_q": w_q, "g": g, "bias": rows}[where].view(-1)[4] = math.nan
    assert token_max_bound(w_q, g, rows[:, -1]) == math.inf
    assert entry_max_bound(w_q, g, rows[:, -1]) == math.inf
    assert causal_bound(w_q, g, rows[:, -1]) == math.inf
    assert frobenius_bound(w_q, g, rows) == math.inf


def test_entry_max_needs_root_d_and_the_sum_of_the_heads() -> None:
    """One large entry among many small ones, and two equal heads, each at the two-sided witness."""
    num_tokens, d_head = 101, 64
    sides = torch.ones(num_tokens, 1)
    sides[1::2] = -1
    sides[-1] = 0
    gap, bias = best_two_sided_gap(num_tokens - 1), plain_bias(1, num_tokens, causal=True)
    direction = torch.full((d_head,), 1 / math.sqrt(2 * (d_head - 1)))
    direction[0] = 1 / math.sqrt(2)
    eye, twice = torch.eye(d_head)[None], torch.ones(2, 1, 1)
    (g,) = phi_inverses(log_mass_of(num_tokens), 1)
    for x, w, biases, too_small in (
        (math.sqrt(gap * math.sqrt(d_head)) * sides * direction, eye, bias, 4 * g + 1),
        (math.sqrt(gap) * sides, twice, bias.expand(2, -1, -1), 4 * g + 1),
    ):
        row = AttentionProblem(x, w, w, biases).last_row()
        assert too_small < norm_from_below(row, "entry_max")
        assert norm_from_below(row, "entry_max") <= entry_max_bound(w, w, log_mass_of(num_tokens))


FROBENIUS_BOUNDS = {
    "fast": local.fast_local_bound,
    "tight": local.tight_local_bound,
    "comparison": local.comparison_local_bound,
}


def two_heads(
    seed: int, num_tokens: int = 16, d_head: int = 8, causal: bool = False, **options: float
) -> AttentionProblem:
    """A random problem whose heads write at right angles."""
    problem = random_problem(seed, 2, d_head, num_tokens, causal, **options)  # type: ignore
    return replace(problem, g=torch.linalg.qr(torch.randn(2 * (2 * d_head,)))[0].view_as(problem.g))


def bank(num_tokens: int, **options: float) -> list[AttentionProblem]:
    """From diffuse attention to one-hot, Gaussian and clustered inputs."""
    return [
        two_heads(seed, num_tokens, 4, spread=spread, clusters=clusters, **options)  # type: ignore
        for seed, spread in enumerate((0.3, 1.0, 2.0, 3.0, 5.0))
        for clusters in (0, 4)
    ]


def at(case: AttentionProblem) -> tuple[torch.Tensor, ...]:
    """The arguments of every local bound."""
    q = case.x.unsqueeze(-3) @ case.w_q
    return q, attention_weights(q, case.bias), case.w_q, case.g


def token_max_witness(num_tokens: int = 101) -> AttentionProblem:
    """D = 1: a query at 0, half the others at r, half at −r, r² = 1 + g: a gain near 4g + 1."""
    r = math.sqrt(1 + float(phi_inverse_from_log(torch.tensor(num_tokens - 1.0).log())))
    x = torch.zeros(num_tokens, 1)
    x[0 : num_tokens // 2], x[num_tokens // 2 : -1] = r, -r
    one = torch.ones(1, 1, 1)
    return AttentionProblem(x, one, one, plain_bias(1, num_tokens, causal=False))


@pytest.mark.parametrize(("causal", "bias_scale"), [(False, 0.0), (True, 0.0), (True, 2.0)])
def test_frobenius_bounds_are_above_the_true_constant_and_close_to_it(
    causal: bool, bias_scale: float
) -> None:
    for case in bank(12, causal=causal, bias_scale=bias_scale):
        true = norm_from_below(case.jacobian(), "frobenius")
        fast, tight, comparison = (float(b(*at(case))) for b in FROBENIUS_BOUNDS.values())
        assert true <= fast <= 6 * true
        assert true <= tight <= 2.8 * true
        assert true <= comparison


def test_the_token_max_bound_is_the_norm_itself_on_the_witness() -> None:
    case = token_max_witness()
    row_sums = case.jacobian().abs().sum((-2, -1))
    bound = local.token_max_local_bound(*at(case))
    torch.testing.assert_close(bound, row_sums.amax(), rtol=1e-9, atol=0)
    certificate = 4 * float(phi_inverse_from_log(torch.tensor(100.0).log())) + 1
    assert 0.87 * certificate < float(bound) < certificate


def test_bounds_hold_for_tight_clusters_far_from_the_origin() -> None:
    case = two_heads(8, 8, 4)
    far = replace(case, x=1e-5 * case.x + 1e4)
    near = replace(case, x=1e-5 * case.x)
    for bound in (*FROBENIUS_BOUNDS.values(), local.token_max_local_bound):
        torch.testing.assert_close(bound(*at(far)), bound(*at(near)), rtol=1e-6, atol=0)
        assert float(bound(*at(far))) >= norm_from_below(near.jacobian(), "frobenius") / 8**0.5


ALL_BOUNDS = {**FROBENIUS_BOUNDS, "token_max": local.token_max_local_bound}


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_bounds_are_per_sample(name: str) -> None:
    case = two_heads(0, 6, 4, causal=True, bias_scale=2.0)
    samples = torch.tensor([0.1, 1.0, 3.0])[:, None, None] * torch.randn(3, *case.x.shape)
    together = ALL_BOUNDS[name](*at(replace(case, x=samples)))
    alone = torch.stack([ALL_BOUNDS[name](*at(replace(case, x=x))) for x in samples])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_a_bound_of_single_precision_is_rounded_outward_and_that_of_nan_infinite(name: str) -> None:
    case = two_heads(9, causal=True)
    bound = ALL_BOUNDS[name](*(t.float() for t in at(case)))
    exact = ALL_BOUNDS[name](*at(case))
    assert bound.dtype == torch.float64
    assert exact <= bound <= exact * (1 + 1e-4)
    broken = replace(case, x=torch.stack([case.x, torch.full_like(case.x, torch.nan)]))
    bound = ALL_BOUNDS[name](*at(broken))
    assert bound[0].isfinite()
    assert bound[1] == torch.inf


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_a_single_token_and_silent_heads_are_no_special_case(name: str) -> None:
    case = two_heads(10, 1, causal=True)
    true = norm_from_below(case.jacobian(), "frobenius")
    assert true * (1 - 1e-12) <= float(ALL_BOUNDS[name](*at(case))) <= 2 * true
    silent = replace(case, g=torch.zeros_like(case.g))
    assert float(ALL_BOUNDS[name](*at(silent))) <= 1e-12


def witnesses() -> list[AttentionProblem]:
    """Inputs on which one term or another is nearly all there is."""
    one = torch.ones(1, 1, 1)

    def tokens(*x: float, causal: bool = False) -> AttentionProblem:
        return AttentionProblem(torch.tensor(x)[:, None], one, one, plain_bias(1, len(x), causal))

    two, three = tokens(0.0, 1.2), tokens(-2.0, 0.0, 2.0)
    hidden = tokens(-2.0, 2.0, 0.0, causal=True)
    same = two_heads(0, 4, spread=0.01)
    same = replace(same, w_q=same.w_q[:1].expand(2, -1, -1), g=same.g[:1].expand(2, -1, -1))
    drawn = tokens(*(0.01 * torch.randn(16)).tolist(), causal=True)
    drawn.bias[..., 0] += 20  # draws every row to the first token: ‖P‖ is about √N
    return [token_max_witness(21), drawn, two, three, hidden, same]


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_no_bound_is_violated_by_a_witness(name: str) -> None:
    for case in witnesses():
        norm = "token_max" if name == "token_max" else "frobenius"
        true = norm_from_below(case.jacobian(), norm)
        assert float(ALL_BOUNDS[name](*at(case))) >= true * (1 - 1e-9)
