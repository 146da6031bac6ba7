import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from invformer.branches.dot_product import DotProductAttention
from invformer.branches.tied_l2.kim import L2Attention
from invformer.config.load import load_config
from invformer.numerics.l2_attention import merge_heads
from invformer.weights.position_bias import CausalMask, RelativePositionBias
from studies.attention_distribution import (
    Case,
    Options,
    Result,
    at_equal_loss,
    cases,
    draw,
    equal_loss,
    summarise,
)
from studies.layer_bounds import (
    Heads,
    Layer,
    compare,
    dot_product_local_bound,
    dot_product_terms,
    heads_of,
)
from tests.support.problems import dense_jacobian

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
            return merge_heads(heads_of(layer, x).p @ frozen)

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


GOOD = Result(2.0, [1.0, 2.0], {"fast": [2.0, 3.0], "g1": [9.0, 9.0]})


def rows_with(result: Result, regulariser: str) -> list[tuple[Case, Result]]:
    """Trained models of both attentions, one of the dot products with another result."""
    other, rows = ("dot_product", regulariser), []
    for case in cases(load_config(TINY, Options)):
        if case.num_steps and case.regulariser in ("none", "jasmin_0"):
            is_other = (case.attention, case.regulariser) == other
            rows.append((case, result if is_other else GOOD))
    return rows


def test_a_training_that_failed_is_reported_and_not_compared() -> None:
    failed = Result(math.nan, [], {})
    for regulariser in ("none", "jasmin_0"):
        rows = rows_with(failed, regulariser)
        assert summarise(rows).outcome == "partly reproduced"
        draw(rows)
    assert ("dot_product", "jasmin_0") not in equal_loss(rows_with(failed, "none"))
    assert equal_loss(rows_with(failed, "jasmin_0"))["dot_product", "jasmin_0"] == [1.0]


@pytest.mark.parametrize("bound", [1.9, math.nan])
def test_a_violated_bound_is_called_a_bug(bound: float) -> None:
    wrong = replace(GOOD, bounds={"fast": [2.0, 3.0], "g1": [2.0, bound]})
    summary = summarise(rows_with(wrong, "none"))
    assert summary.outcome == "not reproduced"
    assert "fails:   1 bounds lie below the truth" in str(summary)
