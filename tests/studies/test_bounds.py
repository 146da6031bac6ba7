"""Bounds of attention by Kim, JaSMin and ours, against dense Jacobians and an ascent."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from invformer.branches.dot_product import DotProductAttention
from invformer.branches.tied_l2 import bounds as contractive
from invformer.branches.tied_l2.kim import L2Attention, paper_output_map
from invformer.config.load import load_config
from invformer.numerics import l2_attention as core
from invformer.weights.position_bias import CausalMask, RelativePositionBias
from studies import attention_distribution as distribution
from studies import jasmin, kim, tightness
from studies.attention_distribution import at_equal_loss, equal_loss
from studies.layer_bounds import (
    Heads,
    Layer,
    compare,
    dot_product_local_bound,
    dot_product_terms,
    heads_of,
)
from tests.support.problems import (
    AttentionProblem,
    attention_problems,
    dense_jacobian,
    jacobian,
    l2_attention,
    norm_from_below,
    of_one_layer,
    random_problem,
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
    assert entry_max <= ours <= kim.entry_max_bound(w_q, w_v, w_o, log_mass)


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


@pytest.mark.parametrize(("causal", "bias_scale"), [(False, 0.0), (True, 0.0), (True, 2.0)])
def test_the_attention_bound_holds(causal: bool, bias_scale: float) -> None:
    bias = random_problem(0, 2, 2, 7, causal, bias_scale=bias_scale).bias
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


CPU = torch.device("cpu")
UPPER = {100: 11.515, 200: 13.588, 400: 15.739, 1000: 18.682}
REFERENCE = {100: 10.095, 200: 12.093, 400: 14.182, 1000: 17.065}
SMALL = tightness.Case(12, 4, 60, 0)


def test_the_row_sums_are_those_of_the_dense_jacobian() -> None:
    x = torch.randn(7)
    dense = dense_jacobian(core.l2_attention, x[:, None]).abs().sum(-1)
    torch.testing.assert_close(tightness.row_sum(x.expand(7, -1), torch.arange(7)), dense)
    assert tightness.largest_row(x) == dense.argmax()


@pytest.mark.parametrize("num_tokens", UPPER)
def test_the_closed_form_and_both_bounds_have_the_known_values(num_tokens: int) -> None:
    one = torch.ones(1, 1, 1)
    assert tightness.worst_row_sum(num_tokens) == pytest.approx(REFERENCE[num_tokens], rel=3e-4)
    for bound in (
        kim.entry_max_bound(one, one, one[0], kim.log_mass_of(num_tokens)),
        of_one_layer(contractive.entry_max_bounds, one, one, kim.log_mass_of(num_tokens)),
    ):
        assert bound == pytest.approx(UPPER[num_tokens], abs=1e-3)


@pytest.mark.parametrize(
    ("num_tokens", "seed"),
    [(100, 0), (100, 5), *(pytest.param(n, 11, marks=pytest.mark.slow) for n in (200, 400, 1000))],
)
def test_the_ascent_comes_within_a_percent_and_never_above(num_tokens: int, seed: int) -> None:
    (case,) = tightness.cases(tightness.Options(sizes=[num_tokens], seed=seed))
    result = tightness.measure(case, CPU)
    assert result.lower == pytest.approx(REFERENCE[num_tokens], rel=0.01)
    assert result.lower <= result.upper == pytest.approx(UPPER[num_tokens], rel=1e-4)


def test_a_value_above_the_bound_is_not_called_reproduced() -> None:
    best = tightness.worst_row_sum(SMALL.num_tokens)
    good = tightness.Result(lower=0.999 * best, upper=best + 1)
    assert tightness.summarise([(SMALL, good)]).outcome == "reproduced"
    for lower in (best + 1.1, 0.9 * best):
        wrong = replace(good, lower=lower)
        assert tightness.summarise([(SMALL, wrong)]).outcome == "not reproduced"


Kind = Literal["dot_product", "l2"]
KINDS: tuple[Kind, ...] = ("dot_product", "l2")
TINY = [
    "d_model=12", "num_heads=2", "num_layers=1", "seq_len=16", "batch_size=4", "num_steps=3",
    "layer_sizes=[]", "data.val_characters=200", "data.max_characters=20000", "num_seeds=1",
    "weights=[0.1]",
]  # fmt: skip


def layer_of(kind: Kind, num_tokens: int = 6, d_model: int = 6, biased: bool = False) -> Layer:
    position = RelativePositionBias(2, num_tokens) if biased else CausalMask(num_tokens)
    return (L2Attention if kind == "l2" else DotProductAttention)(d_model, 2, position).double()


def norm_of(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(dense_jacobian(f, x), 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_the_truth_is_dense_and_no_bound_is_below_it(kind: Kind, biased: bool) -> None:
    layer = layer_of(kind, biased=biased)
    x = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0])[:, None, None] * torch.randn(5, 6, 6)
    with torch.no_grad():
        truth, bounds_by_name = compare(layer, x)
    dense = torch.stack([norm_of(layer, sample) for sample in x])
    torch.testing.assert_close(torch.tensor(truth), dense, rtol=1e-8, atol=0)
    for name, bounds in bounds_by_name.items():
        assert (torch.tensor(bounds) >= dense).all(), name


def test_query_and_key_terms_bound_how_the_weights_of_dot_product_attention_react() -> None:
    layer = layer_of("dot_product")
    assert isinstance(layer, DotProductAttention)
    ratios = []
    for scale in (0.2, 1.0, 3.0):
        x = scale * torch.randn(6, 6)
        frozen = heads_of(layer, x).v

        def reaction(x: Tensor, frozen: Tensor = frozen) -> Tensor:
            return core.merge_heads(heads_of(layer, x).p @ frozen)

        query, key = dot_product_terms(heads_of(layer, x))
        ratios.append(((query + key) / norm_of(reaction, x)).item())
    assert 1 <= min(ratios) <= max(ratios) < 6


@pytest.mark.parametrize("seed", range(12))
def test_a_large_common_offset_of_the_tokens_leaves_the_dot_product_bound_above(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k, w_v, w_o = torch.randn(4, 1, 3, 2, generator=generator, dtype=torch.float64)
    x = 1e6 + 1e-6 * torch.randn(4, 3, generator=generator, dtype=torch.float64)

    def heads(x: Tensor) -> Heads:
        q, k, v = x @ w_q, x @ w_k, x @ w_v
        return Heads(q, k, v, (q @ k.mT / math.sqrt(2)).softmax(-1), w_q, w_k, w_v, w_o.mT)

    def attention(x: Tensor) -> Tensor:
        found = heads(x)
        return (found.p @ found.v @ found.w_o)[0]

    dense = torch.linalg.matrix_norm(dense_jacobian(attention, x), 2)
    assert dense <= dot_product_local_bound(heads(x))


def test_at_equal_loss_a_path_is_followed_until_it_leaves_the_allowed_loss() -> None:
    path = [(2.0, 5.0), (2.05, 4.0), (2.25, 2.0), (2.0, 0.1)]
    assert at_equal_loss(path, 0.0) == 5.0
    assert at_equal_loss(path, 0.05) == pytest.approx(4.0)
    assert at_equal_loss(path, 0.15) == pytest.approx(3.0)
    assert at_equal_loss(path, 1.0) == 0.1
    assert at_equal_loss([(2.0, 5.0), (math.nan, 0.0)], 1.0) == 5.0
    assert at_equal_loss([(2.0, 5.0), (1.9, 6.0)], 0.1) == 5.0


GOOD = distribution.Result(2.0, [1.0, 2.0], {"fast": [2.0, 3.0], "g1": [9.0, 9.0]})


def rows_with(result: distribution.Result, regulariser: str) -> list:
    """Trained models of both attentions, one of the dot products with another result."""
    other, rows = ("dot_product", regulariser), []
    for case in distribution.cases(load_config(TINY, distribution.Options)):
        if case.num_steps and case.regulariser in ("none", "jasmin_0"):
            is_other = (case.attention, case.regulariser) == other
            rows.append((case, result if is_other else GOOD))
    return rows


def test_a_training_that_failed_is_reported_and_not_compared() -> None:
    failed = distribution.Result(math.nan, [], {})
    for regulariser in ("none", "jasmin_0"):
        rows = rows_with(failed, regulariser)
        assert distribution.summarise(rows).outcome == "partly reproduced"
    assert ("dot_product", "jasmin_0") not in equal_loss(rows_with(failed, "none"))
    assert equal_loss(rows_with(failed, "jasmin_0"))["dot_product", "jasmin_0"] == [1.0]


@pytest.mark.parametrize("bound", [1.9, math.nan])
def test_a_violated_bound_is_called_a_bug(bound: float) -> None:
    wrong = replace(GOOD, bounds={"fast": [2.0, 3.0], "g1": [2.0, bound]})
    summary = distribution.summarise(rows_with(wrong, "none"))
    assert summary.outcome == "not reproduced"
    assert "fails:   1 bounds lie below the truth" in str(summary)
