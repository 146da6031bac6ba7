"""The token_max, frobenius and causal certificates: Jacobians, witnesses, ascent."""

import math
from functools import partial

import mpmath
import pytest
import torch
from hypothesis import given, settings

from invformer.branches.tied_l2 import bounds as contractive
from invformer.branches.tied_l2.bounds import diagonal_gains, phi_inverses
from invformer.weights.position_bias import RelativePositionBias
from tests.support.problems import (
    AttentionProblem,
    attention_problems,
    best_two_sided_gap,
    diagonal_norm,
    norm_from_below,
    of_one_layer,
    plain_bias,
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
def test_a_witness_reaches_85_percent_of_the_token_max_certificate(
    num_heads: int, d_head: int, bias: float
) -> None:
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


def test_when_every_row_attends_to_one_token_frobenius_grows_like_root_n() -> None:
    """X = 0 and the first token preferred tenfold: J is P, of norm about √N; K is κ √N."""
    num_tokens, weight = 50, 10.0
    bias = torch.full((1, num_tokens, num_tokens), -math.inf)
    bias[0, :, 0] = math.log(weight)
    bias[0].fill_diagonal_(0)
    one = torch.ones(1, 1, 1)
    problem = AttentionProblem(torch.zeros(num_tokens, 1), one, one, bias)
    attained = norm_from_below(problem.jacobian(), "frobenius")
    bound = frobenius_bound(one, one, problem.log_mass_per_row())
    assert attained > math.sqrt(num_tokens) * weight / (1 + weight)
    assert attained <= bound
    assert bound < 7 * attained


def test_one_token_that_every_row_weighs_against_itself_moves_them_all() -> None:
    """A first token at distance s, preferred by e^s, so that P_i0 = 1/2: ∂Y_i/∂q_0 is (1 − s)/2.

    s is large beside √κ, so the gains of rows must be squared before they are summed.
    """
    num_tokens, gap = 6, 40.0
    x = torch.zeros(num_tokens, 1)
    x[0] = math.sqrt(gap)
    bias = torch.full((1, num_tokens, num_tokens), -math.inf)
    bias[0, :, 0] = gap
    bias[0].fill_diagonal_(0)
    one = torch.ones(1, 1, 1)
    problem = AttentionProblem(x, one, one, bias)
    attained = norm_from_below(problem.jacobian(), "frobenius")
    assert attained >= math.sqrt(num_tokens - 1) * (gap - 1) / 2
    assert attained <= frobenius_bound(one, one, problem.log_mass_per_row())


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
