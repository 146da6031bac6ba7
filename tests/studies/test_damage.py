"""Damaged states: what they are, and that nothing proven about their texts is wrong."""

import pytest
import torch

from invformer.trained.states import perturb
from studies import damage
from studies.damage import Case


def case(kind: str, level: float, seed: int = 0) -> Case:
    return Case("ours", kind, level, 2, 3, seed)


def test_rounding_a_window_is_what_the_command_does_and_bounds_on_damage_hold() -> None:
    z = torch.randn(2, 5, 4, dtype=torch.float64)
    assert torch.allclose(damage.damaged(z, case("bits", 4))[0][1], perturb(z[1], 0.0, 4, 0)[0])
    for kind, level in (("bits", 3), ("channel bits", 3), ("dropped", 2)):
        changed, known = damage.damaged(z, case(kind, level))
        assert ((changed - z).abs() <= known["entries_within"]).all()
    changed, known = damage.damaged(z, case("noise", 0.5))
    assert ((changed - z).norm(dim=-1) <= known["states_within"]).all()


@pytest.mark.usefixtures("certified")
def test_fine_rounding_costs_nothing_and_under_heavy_noise_nothing_proven_is_wrong() -> None:
    clean = damage.measure(case("bits", 20), torch.device("cpu"))
    assert clean.search == clean.few == clean.at_once == clean.proven == 1
    worst = damage.measure(case("noise", 30, seed=1), torch.device("cpu"))
    assert worst.search < 1
    assert worst.wrong == worst.proven == 0
    assert (clean.beyond_radius, worst.beyond_radius) == (0, 1)
