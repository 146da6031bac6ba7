"""Damaged states: what they are, and that nothing proven about their texts is wrong."""

import pytest
import torch

from invformer.evaluation.recovered_text import perturb
from studies import damage
from studies.damage import Case


def case(kind: str, level: float) -> Case:
    return Case("ours", kind, level, 2, 3, 0)


def test_rounding_a_window_is_what_the_command_does_and_cells_hold_the_truth() -> None:
    z = torch.randn(2, 5, 4, dtype=torch.float64)
    rounded, cell = damage.damaged(z, case("bits", 4))
    assert torch.allclose(rounded[1], perturb(z[1], 0.0, 4, 0))
    for kind in ("bits", "channel bits"):
        rounded, cell = damage.damaged(z, case(kind, 3))
        assert cell is not None
        assert ((rounded - z).abs() <= cell * (1 + 1e-12)).all()


@pytest.mark.usefixtures("certified")
def test_fine_rounding_costs_nothing_and_under_heavy_noise_nothing_proven_is_wrong() -> None:
    clean = damage.measure(case("bits", 20), torch.device("cpu"))
    assert clean.search == clean.few == clean.at_once == clean.unique == clean.proven == 1
    worst = damage.measure(case("noise", 30), torch.device("cpu"))
    assert worst.search < 1
    assert worst.wrong == worst.proven == 0
    assert (clean.beyond_radius, worst.beyond_radius) == (0, 1)
