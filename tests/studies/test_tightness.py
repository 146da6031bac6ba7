from dataclasses import replace

import pytest
import torch

from invformer.bounds import contractive
from invformer.nn.kim_attention import paper_output_map
from invformer.numerics.l2_attention import l2_attention
from invformer.numerics.linear_map import dense_jacobian
from invformer.numerics.norms import Norm
from studies import kim
from studies.layer_bounds import project
from studies.tightness import (
    Case,
    Options,
    Result,
    cases,
    gain,
    largest_row,
    largest_rows,
    leading_vector,
    measure,
    rows_of,
    summarise,
    unit_weights,
    worst_row_sum,
)  # fmt: skip

CPU = torch.device("cpu")
UPPER = {100: 11.515, 200: 13.588, 400: 15.739, 1000: 18.682}
REFERENCE = {100: 10.095, 200: 12.093, 400: 14.182, 1000: 17.065}
SMALL = Case("entry_max", 12, 1, 1, 4, 60, 0)


def random_weights(d_model: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_heads, d_model, d_model // num_heads)
    w_q, w_v = torch.randn(shape), torch.randn(shape)
    w_o = torch.randn(num_heads, d_model // num_heads, d_model)
    return w_q, paper_output_map(w_q, w_v, w_o)


def dense(x: torch.Tensor, w_q: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return dense_jacobian(lambda x: (l2_attention(project(x, w_q)) @ g).sum(0), x)


@pytest.mark.parametrize(("d_model", "num_heads"), [(1, 1), (4, 2), (6, 3)])
def test_the_rows_are_those_of_the_dense_jacobian(d_model: int, num_heads: int) -> None:
    w_q, g = random_weights(d_model, num_heads)
    x = torch.randn(5, d_model)
    expected = dense(x, w_q, g).view(5, d_model, 5, d_model)
    assert torch.allclose(rows_of(x, w_q, g), expected, atol=1e-12)


def test_the_largest_row_in_entry_max_is_the_dense_norm() -> None:
    w_q, g = random_weights(4, 2)
    x = torch.randn(1, 7, 4)
    found = gain(x, *largest_rows(x, w_q, g, "entry_max"), w_q, g, "entry_max")
    assert found.item() == pytest.approx(dense(x[0], w_q, g).abs().sum(-1).max().item(), rel=1e-12)


def test_the_largest_row_in_token_max_is_attained_and_beats_random_directions() -> None:
    w_q, g = random_weights(4, 2)
    rows = dense(torch.randn(7, 4), w_q, g).view(7, 4, 7, 4)
    token, direction = largest_row(rows, "token_max")
    assert direction.norm() == pytest.approx(1)
    found = torch.einsum("kje,k->je", rows[token], direction).norm(dim=-1).sum()
    others = torch.nn.functional.normalize(torch.randn(500, 4), dim=-1)
    every = torch.einsum("ikje,sk->sije", rows, others).norm(dim=-1).sum(-1)
    assert every.max() <= found * (1 + 1e-3)


def test_the_frobenius_gain_follows_the_leading_singular_value() -> None:
    w_q, g = random_weights(4, 2)
    x, u = torch.randn(3, 6, 4), None
    for _ in range(200):
        u = leading_vector(x, w_q, g, u)
    sigma = torch.stack([torch.linalg.matrix_norm(dense(part, w_q, g), 2) for part in x])
    assert torch.allclose(gain(x, None, u, w_q, g, "frobenius"), sigma, rtol=1e-6)


@pytest.mark.parametrize("norm", ["entry_max", "token_max", "frobenius"])
def test_a_gain_is_differentiated_with_its_witness_held_fixed(norm: Norm) -> None:
    w_q, g = random_weights(4, 2)
    x = torch.randn(2, 6, 4, requires_grad=True)
    if norm == "frobenius":
        witness = None, leading_vector(x.detach(), w_q, g, None)
    else:
        witness = largest_rows(x.detach(), w_q, g, norm)
    assert torch.autograd.gradcheck(lambda x: gain(x, *witness, w_q, g, norm), (x,))


@pytest.mark.parametrize("num_tokens", UPPER)
def test_the_closed_form_and_both_bounds_have_the_known_values(num_tokens: int) -> None:
    one = torch.ones(1, 1, 1)
    assert worst_row_sum(num_tokens) == pytest.approx(REFERENCE[num_tokens], rel=3e-4)
    for bound in (
        kim.entry_max_bound(one, one, one[0], num_tokens),
        contractive.entry_max_bound(one, one, num_tokens),
    ):
        assert bound == pytest.approx(UPPER[num_tokens], abs=1e-3)


def test_the_closed_form_is_attained_by_its_configuration() -> None:
    num_tokens = 101  # odd: the two halves are equal
    w_q, _, _ = unit_weights(1, 1)
    candidates = torch.linspace(1.5, 2.5, 2001)[:, None, None]
    half = torch.ones(num_tokens // 2, 1)
    x = torch.cat([torch.zeros(1, 1), half, -half]) * candidates
    at_zero, up = torch.zeros(len(x), dtype=torch.long), torch.ones(len(x), 1)
    reached = gain(x, at_zero, up, w_q, torch.ones(1, 1, 1), "entry_max")
    assert reached.max().item() == pytest.approx(worst_row_sum(num_tokens), rel=1e-6)


@pytest.mark.parametrize("seed", [0, 5])
def test_at_a_hundred_tokens_the_ascent_comes_within_a_percent_and_never_above(seed: int) -> None:
    case, *_ = cases(Options(sizes=[100], num_steps=400, seed=seed))
    result = measure(case, CPU)
    assert result.lower == pytest.approx(REFERENCE[100], rel=0.01)
    assert result.lower <= result.upper == pytest.approx(UPPER[100], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [200, 400, 1000])
def test_the_ascent_comes_within_a_percent_and_never_above(num_tokens: int) -> None:
    case, *_ = cases(Options(sizes=[num_tokens], seed=11))
    result = measure(case, CPU)
    assert result.lower == pytest.approx(REFERENCE[num_tokens], rel=0.01)
    assert result.lower <= result.upper == pytest.approx(UPPER[num_tokens], rel=1e-4)


@pytest.mark.parametrize("norm", ["entry_max", "token_max", "frobenius"])
@pytest.mark.parametrize(("d_model", "num_heads"), [(1, 1), (4, 2)])
def test_no_bound_is_exceeded_in_its_own_norm(norm: str, d_model: int, num_heads: int) -> None:
    case = replace(SMALL, norm=norm, d_model=d_model, num_heads=num_heads)
    result = measure(case, CPU)
    assert 0 < result.lower <= result.upper


def test_a_value_above_the_bound_is_not_called_reproduced() -> None:
    best = worst_row_sum(SMALL.num_tokens)
    good = Result(lower=0.999 * best, upper=best + 1)
    assert summarise([(SMALL, good)]).outcome == "reproduced"
    assert summarise([(SMALL, replace(good, lower=best + 1.1))]).outcome == "not reproduced"
    assert summarise([(SMALL, replace(good, lower=0.9 * best))]).outcome == "partly reproduced"
    assert summarise([(replace(SMALL, norm="frobenius"), good)]).outcome == "not in the paper"
