"""Attention: bounds on balls, mean-field statements, mass that splits, variants that break."""

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from torch import Tensor

from invformer.branches.tied_l2.kim import paper_output_map
from studies import breaking, castin, mass_splitting, mean_field, report
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


@pytest.mark.parametrize(
    ("variant", "c", "expected"),
    [
        ("dot_product", 1.0, 1.6666667), ("dot_product", 10.0, 67.666667),
        ("dot_product", 1000.0, 666667.67), ("dot_product_causal", 100.0, 6667.6667),
        ("untied", 1.0, 5.0), ("untied", 10.0, 599.0), ("untied", 1000.0, 5999999.0),
        ("self_hidden", 1.0, 3.0), ("self_hidden", 10.0, 399.0), ("self_hidden", 1e3, 3999999.0),
    ],
)  # fmt: skip
def test_the_broken_variants_have_the_known_norms(
    variant: breaking.Variant, c: float, expected: float
) -> None:
    assert breaking.measure(breaking.Case(variant, c), CPU).broken == pytest.approx(
        expected, rel=1e-7
    )
    assert breaking.FORMULAS[variant](c) == pytest.approx(expected, rel=1e-7)


def test_with_unit_weights_and_nothing_removed_the_spelled_out_map_is_the_library_one() -> None:
    # Mutant check: the variants must differ from tied attention by their slip alone.
    w_q, _, w_v, w_o = breaking.weights("self_hidden", CPU)
    x = torch.tensor([[0.0], [0.3], [-1.1]])
    logits = -(x - x.mT).square()
    g = paper_output_map(w_q, w_v, w_o)
    assert torch.allclose(logits.softmax(-1) @ x, breaking.tied_attention(x, w_q, g))


def summary_with(variant: breaking.Variant, **wrong: float) -> report.Summary:
    rows = [(case, breaking.measure(case, CPU)) for case in breaking.cases(breaking.Options())]
    changed = [(c, replace(r, **wrong) if c.variant == variant else r) for c, r in rows]
    return breaking.summarise(changed)


def test_a_variant_that_stays_bounded_is_not_called_reproduced() -> None:
    assert summary_with("without_a").outcome == "reproduced"
    bounded = summary_with("without_a", broken=5.0)
    assert bounded.outcome == "partly reproduced"
    assert "fails:   without_a 5 (c = 10000) grows like c^0.00" in str(bounded)
    assert summary_with("untied", tied=3.0).outcome == "not reproduced"
