"""Softmax Jacobians: bounds on every eigenvalue, and regularisers built on them."""

import math

import pytest
import torch
from torch import Tensor

from invformer.numerics import l2_attention as core
from studies import jasmin
from studies.layer_bounds import l2_terms
from tests.branches.attention_cases import MASKS, attention_case, logit_bias
from tests.support.problems import dense_jacobian


def distributions(size: int) -> Tensor:
    """From uniform to one-hot, with ties and with zeros."""
    logits = torch.cat([torch.randn(40, size) * scale for scale in (0.1, 1.0, 5.0, 30.0)])
    half = torch.zeros(1, size)
    half[0, :2] = 0.5
    ties = torch.full((1, size), 1 / size)
    return torch.cat([logits.softmax(-1), ties, half, torch.eye(size)[:1]])


def eigenvalues(p: Tensor) -> Tensor:
    """Of diag(p) − ppᵀ, the largest first."""
    jacobian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.linalg.eigvalsh(jacobian).flip(-1)


@pytest.mark.parametrize("size", [2, 3, 8, 40])
def test_every_eigenvalue_is_below_its_g(size: int) -> None:
    p = distributions(size)
    exact = eigenvalues(p)
    for k in range(1, size + 1):
        assert (exact[..., k - 1] <= jasmin.softmax_jacobian_bound(p, k) + 1e-15).all()
    g1 = jasmin.softmax_jacobian_bound(p)
    assert (g1 <= 0.5 + 1e-15).all()
    assert (g1 <= (4 - 2 * math.sqrt(2)) * exact[..., 0] + 1e-15).all()  # the worst ratio known
    assert (jasmin.softmax_jacobian_bound(p, size + 1) == 0).all()


@pytest.mark.parametrize("top", [0.2, 0.5, 0.9])
def test_g1_is_exact_for_an_equal_tail(top: float) -> None:
    p = torch.cat([torch.tensor([top]), torch.full((4,), (1 - top) / 4)])
    torch.testing.assert_close(jasmin.softmax_jacobian_bound(p), eigenvalues(p)[0])


@pytest.mark.parametrize("mask", MASKS)
def test_the_attention_bound_holds(mask: str) -> None:
    bias = logit_bias(mask, 2, 7)
    for scale in (0.1, 0.5, 1.0, 3.0):
        x = scale * torch.randn(7, 4) + torch.randn(4)
        a, w_v = torch.randn(2, 4, 4) / 2, torch.randn(2, 4, 4)

        def weights(z: Tensor, a: Tensor = a) -> Tensor:
            return (z @ a @ z.mT + bias).softmax(-1)

        bound = jasmin.attention_bound(x, weights(x), a, w_v)
        for h in range(2):
            dense = dense_jacobian(lambda z, h=h, v=w_v: weights(z)[h] @ z @ v[h], x)
            assert torch.linalg.matrix_norm(dense, 2) <= bound[h]


def test_the_regulariser_is_the_formula_of_the_paper_on_the_rows_left() -> None:
    p = torch.randn(2, 3, 6, 6).softmax(-1)
    g1 = jasmin.softmax_jacobian_bound(p)
    torch.testing.assert_close(jasmin.jasmin_regulariser(p), g1[..., 1:].log().mean())
    ratio = (g1 / jasmin.softmax_jacobian_bound(p, 2)).log()
    torch.testing.assert_close(jasmin.jasmin_regulariser(p, 2), ratio[..., 3:].mean())
    equal = torch.full((1, 6, 6), 0.02)
    equal[..., :4] = 0.24
    assert float(jasmin.jasmin_regulariser(equal, 3).abs()) < 1e-12


def test_the_query_and_key_terms_bound_what_the_weights_add_to_the_jacobian() -> None:
    case = attention_case(3, num_tokens=8, d_model=8, num_heads=2, scale=2.0)

    def reaction(x: Tensor) -> Tensor:
        """The heads' outputs with values held fixed."""
        weights = core.attention_weights(x.unsqueeze(-3) @ case.w_q, case.bias)
        return (weights @ case.q).transpose(-2, -3).flatten(-2)

    query, key = l2_terms(case.q, case.p, case.w_q)
    true = torch.linalg.matrix_norm(dense_jacobian(reaction, case.x), 2)
    assert true <= query + key <= 4 * true
