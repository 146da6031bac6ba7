"""Networks whose constant is certified and attacked, and texts from their states."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from invformer.branches.in_ball.attention import BoundedAttention
from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from invformer.data.vocabulary import Vocabulary
from invformer.nn.proof import certify
from invformer.nn.residual import InvertibleResidual
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import Norm, vector_norm
from invformer.numerics.rounding import product_up
from invformer.trained.model import TrainedModel
from invformer.trained.states import perturb
from invformer.weights.position_bias import RelativePositionBias
from studies import certified_radius, damage, invertibility, search
from studies import whole_network as study
from studies.forgetting_attention import ForgettingAttention, forgetting_constant
from studies.non_expansive import GradientFeedForward
from tests.support import builders
from tests.support.problems import dense_jacobian

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
