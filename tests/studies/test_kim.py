"""Kim et al. 2021, Theorem 3.2, against dense Jacobians of the printed formula."""

import math

import pytest
import torch
from hypothesis import given, settings

from invformer.bounds import contractive
from invformer.nn.kim_attention import paper_output_map
from studies.kim import entry_max_bound, frobenius_bound
from tests.problems import (
    AttentionProblem,
    attention_problems,
    jacobian,
    l2_attention,
    norm_from_below,
    paper_attention,
    plain_bias,
)


@given(attention_problems)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_no_dense_jacobian_exceeds_a_bound(problem: AttentionProblem) -> None:
    w_q, log_mass, num_tokens = problem.w_q, problem.log_mass(), len(problem.x)
    w_v, heads = torch.randn(w_q.shape), torch.randn(w_q.mT.shape)
    w_o, g = heads.flatten(0, 1), paper_output_map(w_q, w_v, heads)
    jac = jacobian(lambda x: l2_attention(x, w_q, g, problem.bias), problem.x)
    entry_max = norm_from_below(jac, "entry_max")
    frobenius = norm_from_below(jac, "frobenius")
    ours = contractive.entry_max_bound(w_q, g, log_mass)
    assert entry_max <= ours <= entry_max_bound(w_q, w_v, w_o, log_mass)
    assert frobenius <= frobenius_bound(w_q, w_v, w_o, log_mass, num_tokens)


def test_the_exponent_of_the_query_norm_is_four() -> None:
    """N = 2, D = H = 1, W^Q = 10, X = 0: ‖J‖₂ is 100, and F is quadratic in W^Q."""
    w_q, one, bias = torch.full((1, 1, 1), 10.0), torch.ones(1, 1, 1), plain_bias(1, 2, False)
    jac = jacobian(lambda x: paper_attention(x, w_q, one, one[0], bias), torch.zeros(2, 1))
    assert norm_from_below(jac, "frobenius") == pytest.approx(100)
    assert frobenius_bound(w_q, one, one[0], 2, num_tokens=2) == pytest.approx(298.9, abs=0.1)
    for scale in (0.5, 2.0):
        scaled, bound = (frobenius_bound(w, one, one[0], 2, 2) for w in (scale * w_q, w_q))
        assert scaled / bound == pytest.approx(scale**2)


def test_what_is_not_finite_gets_an_infinite_bound() -> None:
    w_q, w_v, w_o = torch.randn(2, 4, 2), torch.randn(2, 4, 2), torch.randn(4, 4)
    w_q[0, 1, 1] = math.nan
    assert entry_max_bound(w_q, w_v, w_o, 5) == math.inf
    assert frobenius_bound(w_q, w_v, w_o, 5, 5) == math.inf
