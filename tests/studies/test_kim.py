"""Kim et al. 2021, Theorem 3.2, against dense Jacobians of the printed formula."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from invformer.bounds import contractive
from studies.kim import entry_max_bound, frobenius_bound
from tests.problems import (
    AttentionProblem,
    attention_problems,
    best_two_sided_gap,
    jacobian,
    l2_attention,
    l2_attention_row,
    norm_from_below,
    paper_attention,
    plain_bias,
    two_sided_gain,
)


def paper_weights(problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W^Q, W^V, W^O of the problem's sizes, and the G_h they amount to."""
    w_q = problem.w_q
    num_heads, width, d_head = w_q.shape
    w_v = torch.randn(num_heads, width, d_head)
    w_o = torch.randn(width, width)
    g = w_q.mT @ w_v @ w_o.unflatten(0, (num_heads, d_head)) / math.sqrt(d_head)
    return w_q, w_v, w_o, g


def test_the_folded_output_map_is_the_printed_formula() -> None:
    w_q, w_v, w_o = torch.randn(2, 6, 3), torch.randn(2, 6, 3), torch.randn(6, 6)
    x, bias = torch.randn(5, 6), plain_bias(2, 5, causal=True)
    g = w_q.mT @ w_v @ w_o.unflatten(0, (2, 3)) / math.sqrt(3)
    torch.testing.assert_close(
        l2_attention(x, w_q, g, bias), paper_attention(x, w_q, w_v, w_o, bias)
    )


@given(attention_problems)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_no_dense_jacobian_exceeds_a_bound(problem: AttentionProblem) -> None:
    w_q, w_v, w_o, g = paper_weights(problem)
    log_mass, num_tokens = problem.log_mass(), len(problem.x)
    jac = jacobian(lambda x: l2_attention(x, w_q, g, problem.bias), problem.x)
    entry_max = norm_from_below(jac, "entry_max")
    frobenius = norm_from_below(jac, "frobenius")
    ours = contractive.entry_max_bound(w_q, g, log_mass)
    assert entry_max <= ours <= entry_max_bound(w_q, w_v, w_o, log_mass)
    assert frobenius <= frobenius_bound(w_q, w_v, w_o, log_mass, num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "best", "bound"),
    [(100, 10.095, 11.515), (200, 12.093, 13.588), (400, 14.185, 15.739), (1000, 17.066, 18.682)],
)
def test_the_scalar_case_has_its_closed_form_optimum(
    num_tokens: int, best: float, bound: float
) -> None:
    """D = H = 1, unit weights: one token at 0, the others at ±a as evenly as they can be."""
    one = torch.ones(1, 1, 1)
    a = math.sqrt(best_two_sided_gap(num_tokens - 1))
    x = torch.full((num_tokens, 1), a)
    x[1::2] = -a
    x[-1] = 0
    bias = plain_bias(1, num_tokens, causal=True)
    last = num_tokens - 1
    row = jacobian(lambda x: l2_attention_row(x, last, one, one, bias)[None], x)
    assert norm_from_below(row, "entry_max") == pytest.approx(best, abs=1e-3)
    assert two_sided_gain(last, a**2) == pytest.approx(best, abs=1e-3)
    assert entry_max_bound(one, one, one[0], num_tokens) == pytest.approx(bound, abs=1e-3)
    assert contractive.entry_max_bound(one, one, num_tokens) == pytest.approx(bound, abs=1e-3)


def test_the_exponent_of_the_query_norm_is_four() -> None:
    """N = 2, D = H = 1, W^Q = 10, X = 0: ‖J‖₂ is 100, and F is quadratic in W^Q."""
    w_q, one, bias = torch.full((1, 1, 1), 10.0), torch.ones(1, 1, 1), plain_bias(1, 2, False)
    jac = jacobian(lambda x: paper_attention(x, w_q, one, one[0], bias), torch.zeros(2, 1))
    assert norm_from_below(jac, "frobenius") == pytest.approx(100)
    assert frobenius_bound(w_q, one, one[0], 2, num_tokens=2) == pytest.approx(298.9, abs=0.1)
    for scale in (0.5, 2.0):
        ratio = frobenius_bound(scale * w_q, one, one[0], 2, 2) / frobenius_bound(
            w_q, one, one[0], 2, 2
        )
        assert ratio == pytest.approx(scale**2)


@pytest.mark.parametrize("broken", ["untied keys", "hidden self token", "values without A_h"])
def test_without_one_of_its_assumptions_the_map_is_steeper_than_the_bound(broken: str) -> None:
    one, bias = torch.ones(1, 1, 1), plain_bias(1, 3, causal=False)
    if broken == "values without A_h":  # tokens differ where W^Q_h is blind, and values see it
        w_q = torch.eye(4).unflatten(1, (2, 2)).movedim(1, 0)
        weights = w_q, w_q + w_q.flip(0), torch.eye(4), plain_bias(2, 3, causal=False)
        x = 1e4 * torch.tensor([[0.0, 0, 0, 0], [0, 0, 1, 0], [0, 0, -1, 0]])
        x[1:, 0] = torch.tensor([0.5, -0.5])
        maps = [partial(paper_attention, w_q=weights[0], w_v=weights[1], w_o=weights[2],
                        bias=weights[3], with_a=with_a) for with_a in (True, False)]  # fmt: skip
        norm, bound = "frobenius", frobenius_bound(*weights[:3], 3, num_tokens=3)
    else:
        hidden = bias.clone()
        hidden[0].fill_diagonal_(-math.inf)
        untied = broken == "untied keys"
        x = torch.tensor([[1000.0], [2100.0], [1900.0]] if untied else [[0.0], [100.0], [-100.0]])
        change = {"bias": bias, "w_k": one / 2} if untied else {"bias": hidden}
        maps = [partial(l2_attention, w_q=one, g=one, **o) for o in ({"bias": bias}, change)]
        norm, bound = "entry_max", contractive.entry_max_bound(one, one, 3)
    sound, steep = (norm_from_below(jacobian(f, x), norm) for f in maps)
    assert sound <= bound < steep


def test_what_is_not_finite_gets_an_infinite_bound() -> None:
    w_q, w_v, w_o = torch.randn(2, 4, 2), torch.randn(2, 4, 2), torch.randn(4, 4)
    w_q[0, 1, 1] = math.nan
    assert entry_max_bound(w_q, w_v, w_o, 5) == math.inf
    assert frobenius_bound(w_q, w_v, w_o, 5, 5) == math.inf
