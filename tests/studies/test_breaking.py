from dataclasses import replace

import pytest
import torch

from invformer.branches.tied_l2.kim import paper_output_map
from studies import breaking
from studies.breaking import FORMULAS, Case, measure
from studies.report import Summary

CPU = torch.device("cpu")


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
    assert measure(Case(variant, c), CPU).broken == pytest.approx(expected, rel=1e-7)
    assert FORMULAS[variant](c) == pytest.approx(expected, rel=1e-7)


def test_with_unit_weights_and_nothing_removed_the_spelled_out_map_is_the_library_one() -> None:
    # Mutant check: the variants must differ from tied attention by their slip alone.
    w_q, _, w_v, w_o = breaking.weights("self_hidden", CPU)
    x = torch.tensor([[0.0], [0.3], [-1.1]])
    logits = -(x - x.mT).square()
    g = paper_output_map(w_q, w_v, w_o)
    assert torch.allclose(logits.softmax(-1) @ x, breaking.tied_attention(x, w_q, g))


def summary_with(variant: breaking.Variant, **wrong: float) -> Summary:
    rows = [(case, measure(case, CPU)) for case in breaking.cases(breaking.Options())]
    changed = [(c, replace(r, **wrong) if c.variant == variant else r) for c, r in rows]
    return breaking.summarise(changed)


def test_a_variant_that_stays_bounded_is_not_called_reproduced() -> None:
    assert summary_with("without_a").outcome == "reproduced"
    bounded = summary_with("without_a", broken=5.0)
    assert bounded.outcome == "partly reproduced"
    assert "fails:   without_a 5 (c = 10000) grows like c^0.00" in str(bounded)
    assert summary_with("untied", tied=3.0).outcome == "not reproduced"
