import math
from dataclasses import replace

import pytest
import torch

from invformer.numerics.norms import Norm
from studies import invertibility
from studies.invertibility import (
    REACHED,
    Case,
    Result,
    measure,
    random_attention,
    reconstruction_errors,
    summarise,
)  # fmt: skip
from tests.support.problems import dense_jacobian

CPU = torch.device("cpu")
CASE = Case(
    map="l2", weights="random", scale=0.9, reach=10.0, seq_len=32, d_model=32, num_heads=8,
    batch_size=4, num_steps=60, train_steps=0, sha256="", seed=0,
)  # fmt: skip
RESULT = Result([1.0, 1e-16], 1.0)


@pytest.mark.parametrize("scale", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("seed", [0, 7])
def test_on_the_wide_range_dot_product_never_converges_and_l2_does(scale: float, seed: int) -> None:
    case = replace(CASE, scale=scale, seed=seed)
    for map in ("l2", "contractive_kim", "contractive"):
        assert measure(replace(case, map=map), CPU).errors[-1] <= REACHED
    dot_product = measure(replace(case, map="dot_product"), CPU)
    assert min(dot_product.errors) > 0.1
    assert not dot_product.inverted


def test_the_error_of_a_linear_map_falls_by_its_factor_every_step() -> None:
    x = torch.randn(2, 3, 4)
    errors = reconstruction_errors(lambda x: -0.5 * x, x, 10)
    start = 0.5 * x.abs().max().item()
    assert errors == pytest.approx([start * 0.5**k for k in range(11)], abs=1e-15)


@pytest.mark.parametrize(
    ("map", "norm"), [("contractive_kim", "entry_max"), ("contractive", "token_max")]
)
def test_contractive_maps_contract_everywhere(map: invertibility.Map, norm: Norm) -> None:
    case = replace(CASE, map=map, seq_len=6, d_model=8, num_heads=2)
    f, factor = random_attention(case)
    for spread in (0.1, 1.0, 10.0):
        x = spread * torch.randn(6, 8)
        blocks = factor * dense_jacobian(f, x).view(6, 8, 6, 8)
        if norm == "entry_max":
            assert blocks.abs().sum((-1, -2)).max() <= 1
        else:  # the sum of the blocks' spectral norms is above the operator norm
            each = torch.linalg.matrix_norm(blocks.transpose(1, 2), 2)
            assert each.sum(-1).max() <= 1


def test_the_verdict_follows_the_rows() -> None:
    dot = replace(CASE, map="dot_product")
    failed = replace(RESULT, errors=[1.0, 1.0])
    narrow = replace(dot, reach=1.0)
    assert summarise([(CASE, RESULT), (dot, failed), (narrow, RESULT)]).outcome == "reproduced"
    assert summarise([(CASE, failed), (dot, failed)]).outcome == "not reproduced"
    assert summarise([(CASE, RESULT), (dot, RESULT)]).outcome == "not reproduced"
    overflown = replace(RESULT, errors=[1.0, math.nan])
    assert summarise([(CASE, overflown), (dot, failed)]).outcome == "not reproduced"
