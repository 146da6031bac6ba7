import math
from dataclasses import replace

import pytest
import torch

from studies import castin, mass_splitting
from studies.mass_splitting import Case, Kind, Options, cases, measure

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["dot_product", "l2"])
def test_the_closed_form_is_brute_force_on_400_measures(kind: Kind) -> None:
    result = measure(Case("random", kind, 0.0, 0.0, 400, 11), CPU)
    assert result.error < 1e-10
    assert (result.share > 0) == (kind == "dot_product")


def moving_only(*arguments: torch.Tensor) -> castin.MassSplitting:
    found = castin.mass_splitting(*arguments)
    return found._replace(splitting=torch.zeros_like(found.splitting))


def test_brute_force_sees_splitting_left_out_and_a_wrong_query_block(monkeypatch) -> None:
    whole = castin.from_blocks
    half = lambda blocks, own, mass: whole(blocks, own / 2, mass)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setitem(mass_splitting.CLOSED_FORMS, "dot_product", moving_only)
        assert measure(Case("random", "dot_product", 0.0, 0.0, 400, 11), CPU).error > 1e-4
    monkeypatch.setattr(castin, "from_blocks", half)
    assert measure(Case("random", "l2", 0.0, 0.0, 12, 11), CPU).error > 1e-3


def test_splitting_pays_on_a_few_percent_of_the_plane_and_never_for_distances() -> None:
    dot = measure(Case("grid", "dot_product", -1.0, 1.0, 31, 0), CPU)
    assert 100 * dot.share == pytest.approx(2.7, abs=0.05)
    for case in (Case("grid", "dot_product", 1.0, 1.0, 31, 0), Case("grid", "l2", 1.0, 1.0, 31, 0)):
        assert measure(case, CPU).share == 0


def test_a_finite_jump_gains_more_than_either() -> None:
    result = measure(Case("finite", "dot_product", 1.0, 2.0, 3, 0), CPU)
    x, one = torch.tensor([[2.0], [1.0], [-3.0]]), torch.ones(1, 1)
    found = castin.mass_splitting(x, torch.full((3,), 1 / 3), one, one)
    assert float(found.moving) == pytest.approx(1.53, abs=0.005)
    assert float(found.splitting) == pytest.approx(0.305, abs=0.001)
    assert result.jump * float(found.moving) == pytest.approx(2.62, abs=0.01)


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
