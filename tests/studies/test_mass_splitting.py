import math
from dataclasses import replace

import pytest
import torch

from studies import castin, mass_splitting
from studies.mass_splitting import Case, Kind, Options, cases, measure

CPU = torch.device("cpu")
MASS = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)  # of the atoms on a grid


@pytest.mark.parametrize("kind", ["dot_product", "l2"])
def test_the_closed_form_is_brute_force_on_400_measures(kind: Kind) -> None:
    result = measure(Case("random", kind, 0.0, 0.0, 400, 11), CPU)
    assert result.error < 1e-10
    assert (result.share > 0) == (kind == "dot_product")


def test_brute_force_sees_splitting_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def moving_only(*arguments: torch.Tensor) -> castin.MassSplitting:
        found = castin.mass_splitting(*arguments)
        return found._replace(splitting=torch.zeros_like(found.splitting))

    monkeypatch.setitem(mass_splitting.CLOSED_FORMS, "dot_product", moving_only)
    assert measure(Case("random", "dot_product", 0.0, 0.0, 400, 11), CPU).error > 1e-4


def test_brute_force_sees_a_wrong_query_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = castin.from_blocks
    monkeypatch.setattr(
        castin, "from_blocks", lambda blocks, own, mass: whole(blocks, own / 2, mass)
    )
    assert measure(Case("random", "l2", 0.0, 0.0, 12, 11), CPU).error > 1e-3


def test_cutting_the_worst_atom_in_two_is_enough() -> None:
    a, one = -torch.ones(1, 1), torch.ones(1, 1)
    case = Case("grid", "dot_product", -1.0, 4.0, 17, 0)
    x = mass_splitting.grid_measures(case)
    x = x[mass_splitting.ratios(case, x).argmax()]
    found = castin.mass_splitting(x, MASS, a, one)
    assert found.splitting > found.moving
    cut = [
        castin.differentiated_constant(
            castin.attention(a, one, mass=mass), torch.cat([x, x[k : k + 1]]), mass
        )
        for k in range(3)
        for mass in [torch.cat([MASS, MASS[k : k + 1] / 2]) - torch.eye(4)[k] * MASS[k] / 2]
    ]
    assert max(cut) == pytest.approx(float(max(found)), rel=1e-10)


def test_the_grid_is_the_closed_form_point_by_point() -> None:
    case = Case("grid", "dot_product", -1.0, 1.0, 9, 0)
    x = mass_splitting.grid_measures(case)
    a, one = -torch.ones(1, 1), torch.ones(1, 1)
    single = [castin.mass_splitting(p, MASS, a, one) for p in x]
    expected = torch.stack([f.splitting / f.moving for f in single])
    torch.testing.assert_close(mass_splitting.ratios(case, x), expected)


def test_splitting_pays_on_a_few_percent_of_the_plane_and_never_for_distances() -> None:
    dot = measure(Case("grid", "dot_product", -1.0, 1.0, 31, 0), CPU)
    assert 100 * dot.share == pytest.approx(2.7, abs=0.05)
    for case in (
        Case("grid", "dot_product", 1.0, 1.0, 31, 0),
        Case("grid", "l2", 1.0, 1.0, 31, 0),
    ):
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
def test_without_areas_where_splitting_pays_the_claim_is_not_reproduced(
    share: float, gain: float, outcome: str
) -> None:
    assert verdict_with("grid", "dot_product", share=share, gain=gain) == outcome
