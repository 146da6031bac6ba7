"""The whole network's constant, certified and attacked; radii that it certifies."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from invformer.branches.in_ball.attention import BoundedAttention
from invformer.config.load import load_config
from invformer.nn.proof import certify
from invformer.nn.residual import InvertibleResidual
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import vector_norm
from invformer.numerics.rounding import product_up
from invformer.weights.position_bias import RelativePositionBias
from studies import certified_radius
from studies import whole_network as study
from studies.forgetting_attention import ForgettingAttention, forgetting_constant
from studies.non_expansive import GradientFeedForward

WORDS = (
    "totals=[4] d_model=24 num_heads=2 num_steps=3 seq_len=12 num_windows=3 pgd_steps=3 "
    "data.max_characters=20000"
)


@pytest.fixture(scope="module")
def row() -> tuple[study.Case, study.Result]:
    """A barely trained network and what is known of it."""
    torch.set_default_dtype(torch.float32)
    (case,) = study.cases(load_config(WORDS.split(), study.Options))
    return case, study.measure(case, torch.device("cpu"))


def test_a_network_has_the_constant_that_was_asked_for(row) -> None:
    case, result = row
    assert 0.9 * case.total < result.bound <= case.total
    assert result.flips[0] == 0


@pytest.mark.parametrize("layers", ["forgetting", "gradient", "contractive"])
def test_no_pair_of_inputs_moves_logits_by_more_than_the_constant_allows(row, layers) -> None:
    case, _ = row
    torch.set_default_dtype(torch.float32)
    model = study.build(replace(case, layers=layers)).double().eval()
    x, y = torch.randn(2, 64, 12, 24, dtype=torch.float64)
    y = x + 10.0 ** torch.linspace(-4, 0, 64, dtype=torch.float64)[:, None, None] * y
    change = (model.predict(model.stack(x)) - model.predict(model.stack(y))).abs().amax((1, 2))
    assert (change <= case.total * (x - y).norm(dim=-1).amax(-1)).all()


def test_a_gradient_layer_lengthens_no_direction_and_shortens_by_its_constant_at_most() -> None:
    layer = InvertibleResidual(GradientFeedForward(6, 40, 0.9))
    with torch.no_grad():  # all units on
        layer.branch.b_in.fill_(100.0)
    x = torch.randn(6)
    jacobian = torch.func.jacrev(lambda x: layer(x[None])[0])(x)
    assert torch.allclose(jacobian, jacobian.T, atol=1e-14)
    smallest, *_, largest = torch.linalg.eigvalsh(jacobian)
    assert 0.1 <= smallest < 0.11
    assert largest <= 1 + 1e-14
    with torch.no_grad():
        layer.branch.b_in.normal_()
    jacobians = torch.func.vmap(torch.func.jacrev(lambda x: layer(x[None])[0]))(torch.randn(99, 6))
    eigenvalues = torch.linalg.eigvalsh(jacobians)
    assert 0.1 <= eigenvalues.min() < 0.8
    assert eigenvalues.max() <= 1 + 1e-14


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize(("c", "share"), [(0.5, 0.45), (0.3, 0.3)])
@pytest.mark.parametrize("louder", [1, 2])
def test_the_constant_of_a_forgetting_layer_is_attained(num_heads, c, share, louder) -> None:
    attention = BoundedAttention(12, num_heads, 2, RelativePositionBias(num_heads, 6), c)
    branch = ForgettingAttention(attention, share).requires_grad_(False)
    # Each head reads one other token, in the directions that it writes to and forgets.
    attention.position.table.zero_()[range(num_heads), range(num_heads)] = 60.0
    attention.log_temperature.fill_(-14.0)
    attention.log_sharpness.fill_(-5.0)
    attention.w_g.weight.copy_(torch.linalg.qr(torch.randn(12, 12))[0][: 2 * num_heads])
    attention.w_qkv.weight[2] = attention.w_g.weight.unflatten(0, (num_heads, 2)).mT
    attention.correction.fill_(louder)
    layer, k = InvertibleResidual(branch), branch.layer_constant()
    direction, best = torch.randn(4, 6, 12).requires_grad_(), 0.0
    optimiser = torch.optim.Adam([direction], lr=0.1)
    for _ in range(100):
        unit = direction / direction.norm(dim=-1, keepdim=True)
        change = (layer(1e-4 * unit) * 1e4).norm(dim=-1).amax(-1)
        best = max(best, change.max().item())
        optimiser.zero_grad()
        (-change.sum()).backward()
        optimiser.step()
    assert best <= k
    if louder == 1:
        assert 0.999 * k < best
        assert k <= forgetting_constant(c, share)
        assert share < branch.lipschitz_bound("token_max") <= c + share


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"flips": [0.1, 1, 1, 1]}, "not reproduced"),
        ({"bound": 11.0}, "not reproduced"),
        ({"nats": 1.7, "accuracy": 0.5}, "partly reproduced"),
        ({"nats": 1.7, "accuracy": 0.61}, "reproduced"),
    ],
)
def test_the_verdict_can_fail(row, changes, outcome) -> None:
    case, result = row
    good = replace(result, bound=10.0, nats=1.7, accuracy=0.7)
    assert study.summarise([(replace(case, total=10.0), replace(good, **changes))]).outcome == (
        outcome
    )


ATTACKED = "totals=[4] d_model=12 num_heads=2 num_layers=1 seq_len=12 data.max_characters=20000"


@pytest.fixture
def model() -> CharTransformer:
    (case,) = study.cases(load_config(ATTACKED.split(), study.Options))
    model = study.build(case).double().eval().requires_grad_(False)
    model.head.weight.copy_(model.head.rows())
    return model


@pytest.fixture
def attacked(model) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of the stack, their logits, and targets that are all predicted."""
    x = model.embedding(torch.randint(model.head.out_features, (6, 12)))
    clean = certified_radius.logits_of(model, x)
    return x, clean, clean.argmax(-1)


def test_an_attack_beats_a_radius_of_a_constant_too_small_and_none_that_is_certified(
    model, attacked
) -> None:
    x, clean, targets = attacked
    certificate = certify(model, "token_max", dtype=torch.float64)
    constant = product_up(*study.layer_constants(model, certificate))
    correct = torch.ones_like(targets, dtype=torch.bool)
    flips = []
    for claimed in (constant, constant / 20):
        radii = certified_radius.certified_radii(model, clean, correct, claimed)
        flips.append(certified_radius.attack_at_radius(model, x, targets, clean, radii, 30))
    assert flips[0] == 0
    assert flips[1] > 0


def test_the_radius_of_a_linear_head_is_the_distance_to_a_border(model) -> None:
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


def test_pgd_stays_in_its_ball_and_does_worse_damage_than_random_steps(model, attacked) -> None:
    x, _, targets = attacked
    radius = torch.linspace(0.0, 0.5, len(x))

    def lost(x: Tensor) -> Tensor:
        return -certified_radius.margins(certified_radius.logits_of(model, x), targets)[:, -1]

    moved = certified_radius.pgd(lost, x, radius, 10)
    step = radius[:, None, None] * certified_radius.unit(torch.randn_like(x))
    assert (vector_norm(moved - x, "token_max") <= radius).all()
    assert (lost(moved) >= lost(x)).all()
    assert (lost(moved)[1:] > lost(x + step)[1:]).all()
