from dataclasses import replace

import pytest
import torch

from invformer.branches.tied_l2 import bounds as contractive
from invformer.numerics.l2_attention import l2_attention
from studies import kim
from studies.tightness import (
    Case,
    Options,
    Result,
    cases,
    largest_row,
    measure,
    row_sum,
    summarise,
    worst_row_sum,
)
from tests.support.problems import dense_jacobian, of_one_layer

CPU = torch.device("cpu")
UPPER = {100: 11.515, 200: 13.588, 400: 15.739, 1000: 18.682}
REFERENCE = {100: 10.095, 200: 12.093, 400: 14.182, 1000: 17.065}
SMALL = Case(12, 4, 60, 0)


def test_the_row_sums_are_those_of_the_dense_jacobian() -> None:
    x = torch.randn(7)
    dense = dense_jacobian(l2_attention, x[:, None]).abs().sum(-1)
    torch.testing.assert_close(row_sum(x.expand(7, -1), torch.arange(7)), dense)
    assert largest_row(x) == dense.argmax()


def test_a_row_sum_is_differentiated_with_its_token_held_fixed() -> None:
    x = torch.randn(2, 6, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: row_sum(x, torch.tensor([1, 4])), (x,))


@pytest.mark.parametrize("num_tokens", UPPER)
def test_the_closed_form_and_both_bounds_have_the_known_values(num_tokens: int) -> None:
    one = torch.ones(1, 1, 1)
    assert worst_row_sum(num_tokens) == pytest.approx(REFERENCE[num_tokens], rel=3e-4)
    for bound in (
        kim.entry_max_bound(one, one, one[0], kim.log_mass_of(num_tokens)),
        of_one_layer(contractive.entry_max_bounds, one, one, kim.log_mass_of(num_tokens)),
    ):
        assert bound == pytest.approx(UPPER[num_tokens], abs=1e-3)


def test_the_closed_form_is_attained_by_its_configuration() -> None:
    num_tokens = 101  # odd: the two halves are equal
    half = torch.ones(num_tokens // 2)
    x = torch.cat([torch.zeros(1), half, -half]) * torch.linspace(1.5, 2.5, 2001)[:, None]
    reached = row_sum(x, torch.zeros(len(x), dtype=torch.long))
    assert reached.max().item() == pytest.approx(worst_row_sum(num_tokens), rel=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "seed"),
    [
        (100, 0),
        (100, 5),
        pytest.param(200, 11, marks=pytest.mark.slow),
        pytest.param(400, 11, marks=pytest.mark.slow),
        pytest.param(1000, 11, marks=pytest.mark.slow),
    ],
)
def test_the_ascent_comes_within_a_percent_and_never_above(num_tokens: int, seed: int) -> None:
    (case,) = cases(Options(sizes=[num_tokens], seed=seed))
    result = measure(case, CPU)
    assert result.lower == pytest.approx(REFERENCE[num_tokens], rel=0.01)
    assert result.lower <= result.upper == pytest.approx(UPPER[num_tokens], rel=1e-4)


def test_a_value_above_the_bound_is_not_called_reproduced() -> None:
    best = worst_row_sum(SMALL.num_tokens)
    good = Result(lower=0.999 * best, upper=best + 1)
    assert summarise([(SMALL, good)]).outcome == "reproduced"
    assert summarise([(SMALL, replace(good, lower=best + 1.1))]).outcome == "not reproduced"
    assert summarise([(SMALL, replace(good, lower=0.9 * best))]).outcome == "not reproduced"
