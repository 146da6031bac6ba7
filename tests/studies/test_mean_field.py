"""Dot-product attention: its bounds on balls, mean-field statements, mass that splits."""

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from torch import Tensor

from studies import castin, mass_splitting, mean_field
from studies.mass_splitting import Case, Kind, Options, cases, measure
from tests.support.problems import dense_jacobian

N, D = 5, 3
MASS = torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05], dtype=torch.float64)


CAUSAL = torch.ones(N, N).tril().bool()
VARIANTS = {"plain": {}, "masked": {"visible": CAUSAL}, "weighted": {"mass": MASS}}


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_weights_are_those_of_a_naive_loop(name: str) -> None:
    x, a, options = torch.randn(N, D), torch.randn(D, D), VARIANTS[name]
    seen, mass = options.get("visible", torch.ones(N, N)), options.get("mass", torch.ones(N))
    p = torch.tensor(
        [[seen[i, j] * mass[j] * (x[j] @ a @ x[i]).exp() for j in range(N)] for i in range(N)]
    )
    expected = (p / p.sum(-1, keepdim=True)).to(x)
    torch.testing.assert_close(castin.dot_product_weights(x, a, **options), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_a_mean_field_bound_is_rounded_up(masked: bool) -> None:
    for bend in (0.1, 100.0, 350.0):
        bound = castin.mean_field_bound(bend, 1.0, 1.0, masked=masked)
        with mpmath.workdps(60):
            b = mpmath.mpf(bend)
            exact = (2 if masked else 1) * mpmath.exp(2 * b) * (1 + 3 * b)
            assert exact <= bound <= exact * (1 + mpmath.mpf("1e-12"))
    assert castin.mean_field_bound(400.0, 1.0, 1.0, masked=masked) == math.inf


def test_the_multi_head_lemma_holds_and_is_exact_for_heads_that_do_not_meet() -> None:
    x, heads = torch.randn(N, D), [(torch.randn(D, D), torch.randn(D, D)) for _ in range(3)]
    w = torch.randn(3, D, D)

    def f(z: Tensor) -> Tensor:
        return sum((castin.attention(a, v)(z) @ w[h].mT for h, (a, v) in enumerate(heads)), 0 * z)

    constants = torch.tensor([norm(dense_jacobian(castin.attention(a, v), x)) for a, v in heads])
    bound = castin.multi_head_bound(w, constants)
    assert norm(dense_jacobian(f, x)) <= bound
    assert bound <= (torch.linalg.matrix_norm(w, 2) * constants).sum() * (1 + 1e-5)
    apart = castin.multi_head_bound(
        torch.eye(6).unflatten(1, (3, 2)).transpose(0, 1), torch.tensor([3.0, 4.0, 0.0])
    )
    assert apart.item() == pytest.approx(5.0, rel=1e-6)


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows() -> list[tuple[mean_field.Case, mean_field.Result]]:
    return [
        (case, mean_field.measure(case, CPU)) for case in mean_field.cases(mean_field.Options())
    ]


def test_all_four_statements_hold(rows) -> None:
    assert mean_field.summarise(rows).outcome == "reproduced"
    assert all(r.value > 0.02 * r.upper for c, r in rows if c.statement == "weighted")


@pytest.mark.parametrize(
    ("statement", "wrong", "outcome"),
    [
        ("weighted", {"value": 1e9}, "not reproduced"),
        ("weighted", {"value": math.nan}, "not reproduced"),
        ("two_dirac", {"predicted": 1e9}, "partly reproduced"),
        ("large_radius", {"predicted": 1.0}, "partly reproduced"),
        ("cesaro", {"value": 1.0}, "partly reproduced"),
    ],
)
def test_a_statement_that_fails_is_named(
    rows, statement: str, wrong: dict[str, float], outcome: str
) -> None:
    changed = [(c, replace(r, **wrong) if c.statement == statement else r) for c, r in rows]
    summary = mean_field.summarise(changed)
    assert summary.outcome == outcome
    assert "fails:" in str(summary)


@pytest.mark.parametrize("kind", ["dot_product", "l2"])
def test_the_closed_form_is_brute_force_on_400_measures(kind: Kind) -> None:
    result = measure(Case("random", kind, 0.0, 0.0, 400, 11), CPU)
    assert result.error < 1e-10
    assert (result.share > 0) == (kind == "dot_product")


def test_splitting_pays_on_a_few_percent_of_the_plane_and_never_for_distances() -> None:
    dot = measure(Case("grid", "dot_product", -1.0, 1.0, 31, 0), CPU)
    assert 100 * dot.share == pytest.approx(2.7, abs=0.05)
    for case in (Case("grid", "dot_product", 1.0, 1.0, 31, 0), Case("grid", "l2", 1.0, 1.0, 31, 0)):
        assert measure(case, CPU).share == 0


def verdict_with(part: str, kind: Kind, **wrong: float) -> str:
    """The outcome over small cases, with other results for one part and kind of attention."""
    rows = []
    for case in cases(Options(num_measures=2)):
        case = replace(case, count=min(case.count, 9))
        result = measure(case, CPU)
        chosen = (case.part, case.kind) == (part, kind)
        rows.append((case, replace(result, **wrong) if chosen else result))
    return mass_splitting.summarise(rows).outcome


def test_a_disagreement_is_not_called_reproduced() -> None:
    assert verdict_with("random", "l2", error=1e-6) == "not reproduced"
    assert verdict_with("random", "l2", error=math.nan) == "not reproduced"


@pytest.mark.parametrize(
    ("share", "gain", "outcome"),
    [
        (0.5, 1.2, "reproduced"),
        (0.5, 1.001, "partly reproduced"),
        (0.001, 1.2, "partly reproduced"),
        (0.0, 0.9, "not reproduced"),
    ],
)
def test_the_claim_needs_areas_in_which_it_pays(share: float, gain: float, outcome: str) -> None:
    assert verdict_with("grid", "dot_product", share=share, gain=gain) == outcome
