"""The least distance of many points, which texts are told apart by."""

import math

import pytest
import torch
from torch.nn import functional as F

from invformer.numerics import least_distance as module
from invformer.numerics.least_distance import least_distance


@pytest.mark.parametrize("count", [2, 9, 40, 41, 137])
@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_the_distances_of_many_points_are_those_of_few_but_rounded_down(
    count: int, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = torch.randn(count, 7, dtype=torch.float64) + shift
    exact = F.pdist(points).min().item()
    assert least_distance(points) == exact
    monkeypatch.setattr(module, "MOST_DIRECT", 8)
    assert exact * (1 - 1e-9) <= least_distance(points) <= exact * (1 + 1e-13 * max(1, shift))


def test_of_one_point_there_is_no_distance_and_of_two_equal_ones_it_is_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = torch.randn(20, 5)
    assert least_distance(points[:1]) == math.inf
    points[13] = points[4]
    assert least_distance(points) == 0
    monkeypatch.setattr(module, "MOST_DIRECT", 8)
    assert least_distance(points) == 0


def test_points_whose_nearest_pair_is_in_one_block_or_across_two_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_DIRECT", 16)  # blocks of six and fewer
    for near in ((0, 1), (3, 4), (17, 18), (2, 19)):
        points = 10 * torch.randn(20, 6, dtype=torch.float64)
        points[near[1]] = points[near[0]] + 1e-3
        assert least_distance(points) == pytest.approx(1e-3 * math.sqrt(6), rel=1e-6)
