"""Softmax Jacobians: exact norms, bounds on every eigenvalue, and regularisers built on them."""

import math

import pytest
import torch
from torch import Tensor

from invformer.bounds import jasmin
from invformer.numerics import l2_attention as core
from invformer.numerics.linear_map import dense_jacobian
from tests.kernels.attention_cases import MASKS, attention_case, logit_bias


def distributions(size: int) -> Tensor:
    """From uniform to one-hot, with ties and with zeros."""
    logits = torch.cat([torch.randn(40, size) * scale for scale in (0.1, 1.0, 5.0, 30.0)])
    p = logits.softmax(-1)
    ties = torch.full((1, size), 1 / size)
    half = torch.zeros(1, size)
    half[0, :2] = 0.5
    one_hot = torch.eye(size)[:1]
    return torch.cat([p, ties, half, one_hot])


def softmax_jacobian(p: Tensor) -> Tensor:
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


@pytest.mark.parametrize("size", [2, 3, 8, 40])
def test_the_exact_norm_agrees_with_the_eigenvalues(size: int) -> None:
    p = distributions(size)
    exact = torch.linalg.eigvalsh(softmax_jacobian(p))[..., -1]
    torch.testing.assert_close(jasmin.softmax_jacobian_norm(p), exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3, 8, 40])
def test_every_eigenvalue_is_below_its_g(size: int) -> None:
    p = distributions(size)
    eigenvalues = torch.linalg.eigvalsh(softmax_jacobian(p)).flip(-1)
    for k in range(1, size + 1):
        assert (eigenvalues[..., k - 1] <= jasmin.softmax_jacobian_bound(p, k) + 1e-15).all()
    assert (jasmin.softmax_jacobian_bound(p) <= 0.5 + 1e-15).all()


def test_g1_is_exact_for_an_equal_tail_and_a_half_at_most() -> None:
    for top in (0.2, 0.5, 0.9):
        p = torch.cat([torch.tensor([top]), torch.full((4,), (1 - top) / 4)])
        torch.testing.assert_close(
            jasmin.softmax_jacobian_bound(p), jasmin.softmax_jacobian_norm(p)
        )
    half = torch.tensor([0.5, 0.5, 0.0])
    torch.testing.assert_close(jasmin.softmax_jacobian_bound(half), torch.tensor(0.5))


def test_the_worst_ratio_known_is_four_minus_two_root_two() -> None:
    """p₂ = (1 − p₁)/3, the rest spread infinitely thin, p₁ → 1."""
    rest, tail = 1e-5, 400_000
    p = torch.full((tail + 2,), rest * 2 / 3 / tail)
    p[0], p[1] = 1 - rest, rest / 3
    ratio = jasmin.softmax_jacobian_bound(p) / jasmin.softmax_jacobian_norm(p)
    assert float(ratio) == pytest.approx(4 - 2 * math.sqrt(2), abs=2e-4)
    everywhere = torch.cat([distributions(size) for size in (8,)])[:-1]
    ratios = jasmin.softmax_jacobian_bound(everywhere) / jasmin.softmax_jacobian_norm(everywhere)
    assert float(ratios.max()) <= 4 - 2 * math.sqrt(2)


def test_a_short_row_has_no_later_g() -> None:
    p = torch.tensor([0.7, 0.3])
    assert jasmin.softmax_jacobian_bound(p, 3) == 0
    torch.testing.assert_close(jasmin.softmax_jacobian_bound(p, 2), torch.tensor(0.21))
    assert jasmin.softmax_jacobian_norm(torch.ones(4, 1)).tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="count from 1, got k = 0"):
        jasmin.softmax_jacobian_bound(p, 0)


@pytest.mark.parametrize("mask", MASKS)
def test_the_attention_bound_holds_and_centring_lowers_it(mask: str) -> None:
    heads, n, width = 2, 7, 4
    bias = logit_bias(mask, heads, n)
    for scale in (0.1, 0.5, 1.0, 3.0):
        x = scale * torch.randn(n, width) + torch.randn(width)
        a, w_v = torch.randn(heads, width, width) / 2, torch.randn(heads, width, 4)

        def weights(z: Tensor, a: Tensor = a) -> Tensor:
            return (z @ a @ z.mT + bias).softmax(-1)

        p = weights(x)
        paper, centred = (
            jasmin.attention_bound(x, p, a, w_v, form) for form in ("paper", "centred")
        )
        assert (centred <= paper * (1 + 1e-9)).all()
        for h in range(heads):
            dense = dense_jacobian(lambda z, h=h, v=w_v: weights(z)[h] @ z @ v[h], x)
            assert torch.linalg.matrix_norm(dense, 2) <= centred[h]


def test_the_regulariser_is_the_formula_of_the_paper_on_the_rows_left() -> None:
    p = torch.randn(2, 3, 6, 6).softmax(-1)
    g1 = jasmin.softmax_jacobian_bound(p)
    expected = g1[..., 1:].log().amax(-1).mean()
    torch.testing.assert_close(jasmin.jasmin_regulariser(p, row_reduction="max"), expected)
    ratio = (g1 / jasmin.softmax_jacobian_bound(p, 2)).log()
    torch.testing.assert_close(jasmin.jasmin_regulariser(p, 2), ratio[..., 3:].mean())
    torch.testing.assert_close(jasmin.jasmin_regulariser(p, 2, num_skipped_rows=0), ratio.mean())


def test_k_above_zero_vanishes_where_the_leading_weights_are_equal() -> None:
    p = torch.full((1, 6, 6), 0.02)
    p[..., :4] = 0.24
    assert float(jasmin.jasmin_regulariser(p, 3).abs()) < 1e-12
    assert float(jasmin.jasmin_regulariser(torch.randn(1, 6, 6).softmax(-1), 3)) > 0


def test_short_causal_prefixes_saturate_the_maximum_unless_skipped() -> None:
    """Two visible tokens of equal weight already have g_1 = ½, the largest there is."""
    p = (torch.zeros(1, 32, 32) + logit_bias("causal", 1, 32)).softmax(-1)
    unskipped = jasmin.jasmin_regulariser(p, row_reduction="max", num_skipped_rows=0)
    assert float(unskipped) == pytest.approx(math.log(0.5), abs=1e-9)
    assert float(jasmin.jasmin_regulariser(p, row_reduction="max", num_skipped_rows=8)) < -2
    assert jasmin.jasmin_regulariser(p, 3).isfinite()


def test_descending_on_k_zero_is_bistable_and_on_k_ten_spreads() -> None:
    start = torch.zeros(2, 16)
    start[0, 0], start[1, 0] = 6.0, 2.0  # p₁ above and below (1 + p₂)/2
    ends = {}
    for k in (0, 10):
        logits = start.clone().requires_grad_()
        optimiser = torch.optim.Adam([logits], lr=0.05)
        for _ in range(150):
            optimiser.zero_grad()
            rows = logits.softmax(-1).unsqueeze(-2).expand(2, 16, 16)
            jasmin.jasmin_regulariser(rows, k, num_skipped_rows=0).backward()
            optimiser.step()
        ends[k] = logits.detach().softmax(-1).amax(-1)
    before = start.softmax(-1).amax(-1)
    assert ends[0][0] > before[0]
    assert ends[0][1] < before[1]
    assert (ends[10] < before).all()


def test_nothing_left_to_regularise_is_refused() -> None:
    p = torch.full((1, 4, 4), 0.25)
    with pytest.raises(ValueError, match="JaSMin_3 on 4 rows with 4 skipped"):
        jasmin.jasmin_regulariser(p, 3)
    with pytest.raises(ValueError, match="needs k ≥ 0"):
        jasmin.jasmin_regulariser(p, -1)


def test_the_sensitivity_regulariser_tracks_the_reaction_where_jasmin_does_not() -> None:
    """Rank correlation with the size of the Jacobian's softmax part, over scales and inputs."""
    true, sensitivity, jasmin_0 = [], [], []
    for seed in range(6):
        for scale in (0.3, 0.8, 1.5, 3.0, 5.0):
            case = attention_case(seed, num_tokens=8, d_model=8, scale=scale, mask="causal")
            values = case.q

            def reaction(x: Tensor, case=case, values=values) -> Tensor:
                p = core.attention_weights(x.unsqueeze(-3) @ case.w_q, case.bias)
                return (p @ values @ case.g).sum(-3)

            true.append(torch.linalg.matrix_norm(dense_jacobian(reaction, case.x), 2))
            sensitivity.append(jasmin.sensitivity_regulariser(case.q, case.p, case.w_q))
            jasmin_0.append(jasmin.jasmin_regulariser(case.p, row_reduction="max"))

    def rank_correlation(a: list[Tensor], b: list[Tensor]) -> float:
        ranks = torch.stack([torch.stack(t).argsort().argsort().double() for t in (a, b)])
        return float(torch.corrcoef(ranks)[0, 1])

    assert rank_correlation(true, sensitivity) > 0.9
    assert rank_correlation(true, jasmin_0) < 0.6


def test_descending_on_the_sensitivity_lowers_the_reaction() -> None:
    case = attention_case(1, num_tokens=8, d_model=8, scale=2.0, mask="causal")
    w_q = case.w_q.clone().requires_grad_()
    optimiser = torch.optim.SGD([w_q], lr=0.02)
    values = []
    for _ in range(20):
        q = case.x.unsqueeze(-3) @ w_q
        loss = jasmin.sensitivity_regulariser(q, core.attention_weights(q, case.bias), w_q)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        values.append(float(loss.detach()))
    assert values[-1] < 0.7 * values[0]
