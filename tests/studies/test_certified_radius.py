"""Certified radii against closed forms, and attacks against radii that are not certified."""

import math

import pytest
import torch
from torch import Tensor

from invformer.config.load import load_config
from invformer.nn.proof import certify
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import vector_norm
from invformer.numerics.rounding import product_up
from studies import certified_radius, whole_network

WORDS = "totals=[4] d_model=12 num_heads=2 num_layers=1 seq_len=12 data.max_characters=20000"


@pytest.fixture
def model() -> CharTransformer:
    (case,) = whole_network.cases(load_config(WORDS.split(), whole_network.Options))
    model = whole_network.build(case).double().eval().requires_grad_(False)
    model.head.weight.copy_(model.head.rows())
    return model


@pytest.fixture
def attacked(model: CharTransformer) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of the stack, their logits, and targets that are all predicted."""
    x = model.embedding(torch.randint(model.head.out_features, (6, 12)))
    clean = certified_radius.logits_of(model, x)
    return x, clean, clean.argmax(-1)


def test_an_attack_beats_a_radius_of_a_constant_too_small_and_none_that_is_certified(
    model: CharTransformer, attacked: tuple[Tensor, Tensor, Tensor]
) -> None:
    x, clean, targets = attacked
    certificate = certify(model, "token_max", dtype=torch.float64)
    constant = product_up(*whole_network.layer_constants(model, certificate))
    correct = torch.ones_like(targets, dtype=torch.bool)
    flips = []
    for claimed in (constant, constant / 20):
        radii = certified_radius.certified_radii(model, clean, correct, claimed)
        flips.append(certified_radius.attack_at_radius(model, x, targets, clean, radii, 30))
    assert flips[0] == 0
    assert flips[1] > 0


def test_the_radius_of_a_linear_head_is_the_distance_to_a_border(model: CharTransformer) -> None:
    z = torch.randn(3, 4, model.head.in_features)
    logits, w = model.head(z), model.head.weight
    correct = torch.ones(3, 4, dtype=torch.bool)
    radii = certified_radius.certified_radii(model, logits, correct, 1.0)
    y = logits.argmax(-1)
    towards = w[None, None] - w[y].unsqueeze(-2)  # (windows, tokens, vocab, width)
    reach = (logits.amax(-1, keepdim=True) - logits) / towards.norm(dim=-1)
    nearest = reach.nan_to_num(nan=math.inf).argmin(-1)
    direction = certified_radius.unit(
        towards.take_along_dim(nearest[..., None, None], -2).squeeze(-2)
    )
    for factor, stays in ((1 - 1e-6, True), (1 + 1e-6, False)):
        moved = model.head(z + factor * radii.unsqueeze(-1) * direction)
        assert ((moved.argmax(-1) == y) == stays).all()
    assert (certified_radius.certified_radii(model, logits, ~correct, 1.0) == 0).all()


def test_pgd_stays_in_its_ball_and_does_worse_damage_than_random_steps(
    model: CharTransformer, attacked: tuple[Tensor, Tensor, Tensor]
) -> None:
    x, _, targets = attacked
    radius = torch.linspace(0.0, 0.5, len(x))

    def lost(x: Tensor) -> Tensor:
        return -certified_radius.margins(certified_radius.logits_of(model, x), targets)[:, -1]

    moved = certified_radius.pgd(lost, x, radius, 10)
    step = radius[:, None, None] * certified_radius.unit(torch.randn_like(x))
    assert (vector_norm(moved - x, "token_max") <= radius).all()
    assert (lost(moved) >= lost(x)).all()
    assert (lost(moved)[1:] > lost(x + step)[1:]).all()
