"""Kim et al. 2021, Theorem 3.2, against dense Jacobians of the printed formula."""

import torch
from hypothesis import given, settings

from invformer.branches.tied_l2 import bounds as contractive
from invformer.branches.tied_l2.kim import paper_output_map
from studies.kim import entry_max_bound
from tests.support.problems import (
    AttentionProblem,
    attention_problems,
    jacobian,
    l2_attention,
    norm_from_below,
    of_one_layer,
)


@given(attention_problems)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_no_dense_jacobian_exceeds_a_bound(problem: AttentionProblem) -> None:
    w_q, log_mass = problem.w_q, problem.log_mass()
    w_v, heads = torch.randn(w_q.shape), torch.randn(w_q.mT.shape)
    w_o, g = heads.flatten(0, 1), paper_output_map(w_q, w_v, heads)
    jac = jacobian(lambda x: l2_attention(x, w_q, g, problem.bias), problem.x)
    entry_max = norm_from_below(jac, "entry_max")
    ours = of_one_layer(contractive.entry_max_bounds, w_q, g, log_mass)
    assert entry_max <= ours <= entry_max_bound(w_q, w_v, w_o, log_mass)
