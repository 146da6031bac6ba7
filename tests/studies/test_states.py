"""Texts from states: one position at a time, damaged, and maps that are inverted."""

import math
from dataclasses import replace

import pytest
import torch

from invformer.config.schema import TrainConfig
from invformer.data.vocabulary import Vocabulary
from invformer.numerics.norms import Norm
from invformer.trained.model import TrainedModel
from invformer.trained.states import perturb
from studies import damage, invertibility, search
from tests.support import builders
from tests.support.problems import dense_jacobian


@torch.no_grad()
def test_states_behind_known_symbols_are_those_of_the_whole_text() -> None:
    with torch.enable_grad():
        model = builders.trained_a_little(builders.contractive_model(bounded=True)).eval()
    (text,) = builders.random_tokens(1)
    z, prefix = model.stack(model.embedding(text[None])), search.Prefix(model)
    for i, symbol in enumerate(text.split(1)):
        candidates = torch.cat([torch.zeros_like(symbol), symbol])
        found = prefix.states(prefix.embed(candidates))
        torch.testing.assert_close(found[:, 1], z[:, i])
        prefix.append(symbol)


def case(kind: str, level: float, seed: int = 0) -> damage.Case:
    return damage.Case("ours", kind, level, 2, seed)


def test_rounding_a_window_is_what_the_command_does_and_bounds_on_damage_hold() -> None:
    z = torch.randn(2, 5, 4, dtype=torch.float64)
    assert torch.allclose(damage.damaged(z, case("bits", 4))[0][1], perturb(z[1], 0.0, 4, 0)[0])
    for kind, level in (("bits", 3), ("channel bits", 3), ("dropped", 2)):
        changed, known = damage.damaged(z, case(kind, level))
        assert ((changed - z).abs() <= known["entries_within"]).all()
    changed, known = damage.damaged(z, case("noise", 0.5))
    assert ((changed - z).norm(dim=-1) <= known["states_within"]).all()


def test_fine_rounding_costs_nothing_and_under_heavy_noise_nothing_proven_is_wrong(
    monkeypatch,
) -> None:
    network = builders.trained_a_little(builders.scaled_model()).double()
    ours = TrainedModel(network, Vocabulary.from_text("abcdefghij"), TrainConfig(), {})
    monkeypatch.setattr(damage, "trained", lambda folder: ours)
    monkeypatch.setattr(damage, "windows", lambda folder, count: builders.random_tokens(count))
    clean = damage.measure(case("bits", 20), torch.device("cpu"))
    assert clean.search == clean.at_once == clean.proven == 1
    worst = damage.measure(case("noise", 30, seed=1), torch.device("cpu"))
    assert worst.search < 1
    assert worst.wrong == worst.proven == 0
    assert (clean.beyond_radius, worst.beyond_radius) == (0, 1)


CPU = torch.device("cpu")
CASE = invertibility.Case(
    map="l2", weights="random", scale=0.9, reach=10.0, seq_len=32, d_model=32, num_heads=8,
    batch_size=4, num_steps=60, train_steps=0, sha256="", seed=0,
)  # fmt: skip
RESULT = invertibility.Result([1.0, 1e-16], 1.0)


@pytest.mark.parametrize("scale", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("seed", [0, 7])
def test_on_the_wide_range_dot_product_never_converges_and_l2_does(scale: float, seed: int) -> None:
    case = replace(CASE, scale=scale, seed=seed)
    for map in ("l2", "contractive_kim", "contractive"):
        assert invertibility.measure(replace(case, map=map), CPU).inverted
    dot_product = invertibility.measure(replace(case, map="dot_product"), CPU)
    assert min(dot_product.errors) > 0.1
    assert not dot_product.inverted


def test_the_error_of_a_linear_map_falls_by_its_factor_every_step() -> None:
    x = torch.randn(2, 3, 4)
    errors = invertibility.reconstruction_errors(lambda x: -0.5 * x, x, 10)
    start = 0.5 * x.abs().max().item()
    assert errors == pytest.approx([start * 0.5**k for k in range(11)], abs=1e-15)


@pytest.mark.parametrize(
    ("map", "norm"), [("contractive_kim", "entry_max"), ("contractive", "token_max")]
)
def test_contractive_maps_contract_everywhere(map: invertibility.Map, norm: Norm) -> None:
    case = replace(CASE, map=map, seq_len=6, d_model=8, num_heads=2)
    f, factor = invertibility.random_attention(case)
    for spread in (0.1, 1.0, 10.0):
        x = spread * torch.randn(6, 8)
        blocks = factor * dense_jacobian(f, x).view(6, 8, 6, 8)
        if norm == "entry_max":
            assert blocks.abs().sum((-1, -2)).max() <= 1
        else:  # the sum of the blocks' spectral norms is above the operator norm
            each = torch.linalg.matrix_norm(blocks.transpose(1, 2), 2)
            assert each.sum(-1).max() <= 1


def test_the_verdict_follows_the_rows() -> None:
    dot = replace(CASE, map="dot_product")
    failed = replace(RESULT, errors=[1.0, 1.0])
    narrow = replace(dot, reach=1.0)
    good = [(CASE, RESULT), (dot, failed), (narrow, RESULT)]
    assert invertibility.summarise(good).outcome == "reproduced"
    overflown = replace(RESULT, errors=[1.0, math.nan])
    for ours, theirs in ((failed, failed), (RESULT, RESULT), (overflown, failed)):
        outcome = invertibility.summarise([(CASE, ours), (dot, theirs)]).outcome
        assert outcome == "not reproduced"
