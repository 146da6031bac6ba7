"""Certificates broken on purpose, each with a concrete witness that refutes it.

A witness measures a norm exactly or from below. The mutant dies if what is measured exceeds what
it claims; the right certificate must stand above the same measurement. Some mutants break the
formula, some apply the right formula to a map that lacks one of its assumptions.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from invformer.bounds import contractive, kim, layers
from invformer.numerics.lambert_w import phi_inverse_upper
from invformer.numerics.spectral_norm import spectral_norm_bound
from tests.problems import (
    AttentionProblem,
    best_two_sided_gap,
    jacobian,
    l2_attention,
    matrix_with,
    norm_from_below,
    paper_attention,
    plain_bias,
    two_headed_problem,
    two_sided_problem,
)


class Verdict(NamedTuple):
    """What the witness measured, what the mutant claims, what the right certificate says.

    ``right`` and ``measured_right`` differ from the mutant's side where the mutant breaks the map.
    """

    measured: float
    claimed: float
    measured_right: float
    right: float


def same_map(measured: float, claimed: float, right: float) -> Verdict:
    return Verdict(measured, claimed, measured, right)


ONE = [[[1.0]]]


def untied_keys() -> Verdict:
    """W^K = W^Q/2: the anchor of the self token is gone, and the constant with it."""
    one, bias = torch.tensor(ONE), plain_bias(1, 3, causal=False)
    x = torch.tensor([[1000.0], [2000 + 100.0], [2000 - 100.0]])
    broken = jacobian(lambda x: l2_attention(x, one, one, bias, w_k=one / 2), x)
    sound = jacobian(lambda x: l2_attention(x, one, one, bias), x)
    bound = kim.entry_max_composite_bound(one, one, 3)
    return Verdict(
        norm_from_below(broken, "entry_max"), bound, norm_from_below(sound, "entry_max"), bound
    )


def hidden_self_token() -> Verdict:
    """The diagonal masked: two others at ±c pull without limit."""
    one, bias = torch.tensor(ONE), plain_bias(1, 3, causal=False)
    hidden = bias.clone()
    hidden[0].fill_diagonal_(-math.inf)
    x = torch.tensor([[0.0], [100.0], [-100.0]])
    broken = jacobian(lambda x: l2_attention(x, one, one, hidden), x)
    sound = jacobian(lambda x: l2_attention(x, one, one, bias), x)
    bound = kim.entry_max_composite_bound(one, one, 3)
    return Verdict(
        norm_from_below(broken, "entry_max"), bound, norm_from_below(sound, "entry_max"), bound
    )


def value_path_without_a() -> Verdict:
    """H = 2 and P X W^V without A_h: tokens differ where W^Q_h is blind, values see it."""
    w_q = torch.eye(4).unflatten(1, (2, 2)).movedim(1, 0)
    w_v = w_q + w_q.flip(0)
    w_o, bias = torch.eye(4), plain_bias(2, 3, causal=False)
    x = 1e4 * torch.tensor([[0.0, 0, 0, 0], [0, 0, 1, 0], [0, 0, -1, 0]]) + 0.5 * torch.tensor(
        [[0.0, 0, 0, 0], [1, 0, 0, 0], [-1, 0, 0, 0]]
    )

    def measured(with_a: bool) -> float:
        jac = jacobian(lambda x: paper_attention(x, w_q, w_v, w_o, bias, with_a), x)
        return norm_from_below(jac, "frobenius")

    bound = kim.frobenius_bound(w_q, w_v, w_o, 3, num_tokens=3)
    return Verdict(measured(False), bound, measured(True), bound)


def square_for_fourth_power() -> Verdict:
    """‖W^Q‖² in Kim's frobenius bound: F is quadratic in W^Q, so its square cannot do."""
    w_q, one, bias = torch.full((1, 1, 1), 10.0), torch.tensor(ONE), plain_bias(1, 2, False)
    jac = jacobian(lambda x: paper_attention(x, w_q, one, one[0], bias), torch.zeros(2, 1))
    right = kim.frobenius_bound(w_q, one, one[0], 2, num_tokens=2)
    return same_map(norm_from_below(jac, "frobenius"), right / 10, right)


def root_n_dropped_in_frobenius() -> Verdict:
    """κ in place of (Σ_i κ_i²)^½: every row attends to the first token."""
    num_tokens = 200
    one, bias = torch.tensor(ONE), torch.full((1, num_tokens, num_tokens), -math.inf)
    bias[0, :, 0] = math.log(10)
    bias[0].fill_diagonal_(0)
    problem = AttentionProblem(torch.zeros(num_tokens, 1), one, one, bias)
    measured = norm_from_below(problem.jacobian(), "frobenius")
    rows = problem.log_mass_per_row()
    claimed = contractive.frobenius_bound(one, one, rows[:, -1:])
    return same_map(measured, claimed, contractive.frobenius_bound(one, one, rows))


def witness(bias: float = 0.0) -> tuple[AttentionProblem, float]:
    """The two-sided witness at N = 255 and the token_max norm it attains."""
    problem = two_sided_problem(255, best_two_sided_gap(254 * math.exp(bias)), bias=bias)
    return problem, norm_from_below(problem.last_row(), "token_max")


def product_of_norms(problem: AttentionProblem) -> float:
    return (spectral_norm_bound(problem.w_q) * spectral_norm_bound(problem.g)).sum().item()


def bracket_of_two_g_plus_one() -> Verdict:
    """2g + 1 counts the covariance and forgets that the other tokens move."""
    problem, measured = witness()
    claimed = (2 * phi_inverse_upper(254) + 1) * product_of_norms(problem)
    return same_map(measured, claimed, contractive.token_max_bound(problem.w_q, problem.g, 255))


def bracket_of_four_g() -> Verdict:
    """4g forgets the convex combination itself: a token that sees only itself has gain one."""
    problem = two_sided_problem(1, 1.0)
    measured = norm_from_below(problem.last_row(), "token_max")
    return same_map(measured, 0.0, contractive.token_max_bound(problem.w_q, problem.g, 1))


def causal_gain_as_global_constant() -> Verdict:
    """κ(n) bounds the diagonal blocks; all tokens moving together gain twice that."""
    problem, measured = witness()
    claimed = contractive.causal_bound(problem.w_q, problem.g, 255)
    return same_map(measured, claimed, contractive.token_max_bound(problem.w_q, problem.g, 255))


def bias_forgotten_in_the_mass() -> Verdict:
    """N − 1 for the mass although every other token is preferred e⁴-fold."""
    problem, measured = witness(bias=4.0)
    claimed = contractive.token_max_bound(problem.w_q, problem.g, 255)
    right = contractive.token_max_bound(problem.w_q, problem.g, problem.log_mass())
    return same_map(measured, claimed, right)


def log_mass_for_the_mass() -> Verdict:
    """g(log n) for g(n): the two calling conventions confused."""
    problem, measured = witness()
    claimed = (4 * phi_inverse_upper(math.log(254)) + 1) * product_of_norms(problem)
    return same_map(measured, claimed, contractive.token_max_bound(problem.w_q, problem.g, 255))


def mass_of_the_mean_row() -> Verdict:
    """The average row of a causal mask sees half as much as the last."""
    problem = two_sided_problem(1001, best_two_sided_gap(1000))
    measured = norm_from_below(problem.last_row(), "token_max")
    mean_row = problem.log_mass_per_row().exp().mean().sqrt().log()
    claimed = contractive.token_max_bound(problem.w_q, problem.g, mean_row[None])
    return same_map(measured, claimed, contractive.token_max_bound(problem.w_q, problem.g, 1001))


def root_of_heads_dropped() -> Verdict:
    """‖[κ_h σ_h G_h]‖₂ without √H: heads that look at different tokens are excited together."""
    problem, _ = two_headed_problem(200)
    measured = norm_from_below(problem.last_row(), "token_max")
    right = contractive.token_max_bound(
        problem.w_q, problem.g, problem.log_mass_per_row()[:, -1].contiguous()
    )
    return same_map(measured, right / math.sqrt(2), right)


def largest_head_for_their_sum() -> Verdict:
    """max_h in the composite form: two equal heads add up."""
    one = torch.ones(2, 1, 1)
    problem = two_sided_problem(101, best_two_sided_gap(100))
    scale = problem.w_q.abs().item()
    twice = AttentionProblem(problem.x * scale, one, one, problem.bias.expand(2, -1, -1))
    measured = norm_from_below(twice.last_row(), "entry_max")
    claimed = kim.entry_max_composite_bound(one[:1], one[:1], 101)
    return same_map(measured, claimed, kim.entry_max_composite_bound(one, one, 101))


def root_d_dropped_in_entry_max() -> Verdict:
    """(4u + 1) for (4 √d u + 1) with G_h given: one large entry among many small ones."""
    num_tokens, d_head = 101, 64
    direction = torch.full((d_head,), 1 / math.sqrt(2 * (d_head - 1)))
    direction[0] = 1 / math.sqrt(2)
    sides = torch.ones(num_tokens, 1)
    sides[1::2] = -1
    sides[-1] = 0
    r = math.sqrt(best_two_sided_gap(num_tokens - 1) * math.sqrt(d_head))
    eye = torch.eye(d_head)[None]
    bias = plain_bias(1, num_tokens, causal=True)
    problem = AttentionProblem(r * sides * direction, eye, eye, bias)
    measured = norm_from_below(problem.last_row(), "entry_max")
    claimed = 4 * phi_inverse_upper(num_tokens - 1) + 1
    return same_map(measured, claimed, kim.entry_max_composite_bound(eye, eye, num_tokens))


def norm_of_the_sum_of_heads() -> Verdict:
    """‖Σ_h W^Q_h G_h‖₂ for heads whose gains differ: they need not weigh alike at every input."""
    w_q = torch.ones(2, 1, 1)
    g = torch.tensor([[[1.0]], [[-1.0]]])
    bias = plain_bias(2, 2, causal=True)
    bias[1, 1, 0] = -math.inf
    problem = AttentionProblem(torch.zeros(2, 1), w_q, g, bias)
    measured = norm_from_below(problem.jacobian(), "token_max")
    return same_map(measured, 0.0, contractive.token_max_bound(w_q, g, 2))


def gelu_slope_of_1_12() -> Verdict:
    """The constant in circulation; GELU reaches 1.1289 at √2."""
    jac = jacobian(lambda x: F.gelu(x), torch.full((1, 1), math.sqrt(2)))
    eye = torch.eye(1)
    return same_map(
        norm_from_below(jac, "frobenius"),
        1.12,
        layers.feed_forward_bound(eye, eye, "gelu", "frobenius"),
    )


def silu_slope_rounded_down() -> Verdict:
    """1.0998 is the slope of SiLU to four decimals, and below it."""
    jac = jacobian(lambda x: F.silu(x), torch.full((1, 1), 2.399357))
    eye = torch.eye(1)
    return same_map(
        norm_from_below(jac, "frobenius"),
        1.0998,
        layers.feed_forward_bound(eye, eye, "silu", "frobenius"),
    )


def rows_for_columns() -> Verdict:
    """‖W‖_∞ for ‖Wᵀ‖_∞ in entry_max: x W sums over the inputs of one output."""
    weight = torch.ones(5, 1)
    jac = jacobian(lambda x: (x @ weight).expand(-1, 5), torch.zeros(1, 5))
    return same_map(
        norm_from_below(jac, "entry_max"),
        kim.max_row_sum(weight),
        layers.linear_bound(weight, "entry_max"),
    )


def mean_scale_of_layer_norm() -> Verdict:
    """The mean of |γ| for its largest entry."""
    gamma = torch.tensor([0.1, 3.0, 0.1, 0.1])
    jac = jacobian(lambda x: F.layer_norm(x, (4,), gamma, eps=1e-3), torch.ones(1, 4))
    return same_map(
        norm_from_below(jac, "token_max"),
        layers.layer_norm_bound(gamma.mean().expand(4), 4, 1e-3, "token_max"),
        layers.layer_norm_bound(gamma, 4, 1e-3, "token_max"),
    )


def float32_svd_as_bound() -> Verdict:
    """A singular value computed in float32 is off by 1e-7, in either direction."""
    weights = torch.randn(64, 40, 40, dtype=torch.float32)
    computed = torch.linalg.matrix_norm(weights, 2).double()
    truth = torch.linalg.matrix_norm(weights.double(), 2)
    worst = (computed / truth).argmin()
    bound = spectral_norm_bound(weights[worst]).item()
    # The float64 value is good to 1e-14; the witness is below it by far more.
    return same_map(truth[worst].item() * (1 - 1e-13), computed[worst].item(), bound)


def float32_gram_without_rounding() -> Verdict:
    """Gram iteration proves ‖W‖ ≤ ‖G_K‖_F^{2^{−K}} in exact arithmetic only."""
    torch.manual_seed(1)
    weights = torch.randn(64, 200, 1, dtype=torch.float32)
    gram = (weights.mT @ weights)[:, 0, 0]
    computed = (gram * gram).sqrt().sqrt().double()
    truth = torch.linalg.vector_norm(weights.double(), dim=(-2, -1))
    worst = (computed / truth).argmin()
    bound = spectral_norm_bound(weights[worst]).item()
    return same_map(truth[worst].item() * (1 - 1e-13), computed[worst].item(), bound)


def certified_before_the_cast() -> Verdict:
    """The float32 weight is certified, its bfloat16 cast is what runs."""
    weights = torch.stack([matrix_with(torch.ones(2), 2, 2, seed) for seed in range(32)])
    cast = weights.to(torch.bfloat16)
    truth = torch.linalg.matrix_norm(cast.double(), 2)
    worst = truth.argmax()
    return same_map(
        truth[worst].item() * (1 - 1e-13),
        spectral_norm_bound(weights[worst]).item(),
        spectral_norm_bound(cast[worst]).item(),
    )


MUTANTS: dict[str, Callable[[], Verdict]] = {
    mutant.__name__: mutant
    for mutant in (
        untied_keys,
        hidden_self_token,
        value_path_without_a,
        square_for_fourth_power,
        root_n_dropped_in_frobenius,
        bracket_of_two_g_plus_one,
        bracket_of_four_g,
        causal_gain_as_global_constant,
        bias_forgotten_in_the_mass,
        log_mass_for_the_mass,
        mass_of_the_mean_row,
        root_of_heads_dropped,
        largest_head_for_their_sum,
        root_d_dropped_in_entry_max,
        norm_of_the_sum_of_heads,
        gelu_slope_of_1_12,
        silu_slope_rounded_down,
        rows_for_columns,
        mean_scale_of_layer_norm,
        float32_svd_as_bound,
        float32_gram_without_rounding,
        certified_before_the_cast,
    )
}
