import math
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from invformer.config.load import load_config
from invformer.nn.transformer import CharTransformer
from invformer.numerics.norms import vector_norm
from studies import robustness
from studies.certified_radius import (
    attack_at_radius,
    certified_radii,
    feature_constant,
    logits_of,
    margins,
    pgd,
    read_out_constant,
    unit,
)
from studies.robustness import (
    Case,
    Kind,
    Options,
    Result,
    build_kind,
    cases,
    examine,
    measure,
    summarise,
)
from studies.training import train_by_adam

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = get_args(Kind)
TINY = [
    "d_model=12", "num_heads=2", "num_layers=1", "seq_len=12", "batch_size=8", "num_steps=60",
    "lr=0.02", "num_windows=6", "pgd_steps=12", "data.val_characters=200", "num_seeds=1",
    "data.max_characters=20000",
]  # fmt: skip


def tiny_case(kind: Kind, *words: str) -> Case:
    (case,) = [c for c in cases(load_config([*TINY, *words], Options)) if c.kind == kind]
    return case


@cache
def trained(kind: Kind) -> tuple[CharTransformer, Tensor, Tensor]:
    """A small trained model in float64 with the windows it is attacked on."""
    case = tiny_case(kind)
    model = build_kind(case)
    assert all(map(math.isfinite, train_by_adam(model, case)))
    windows, targets = case.text.windows(case.seq_len, CPU)
    model = model.double().eval().requires_grad_(False)
    return model, windows[: case.num_windows], targets[: case.num_windows]


@cache
def examined() -> Result:
    """What the study measures of the model with a linear head."""
    return examine(*trained("contractive_linear"), tiny_case("contractive_linear"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_beats_a_certified_radius(kind: Kind) -> None:
    result = examine(*trained(kind), tiny_case(kind, "pgd_steps=30"))
    assert result.flips[0] == 0
    assert result.radius > (1e-3 if kind == "contractive_linear" else 0)


def test_a_constant_many_times_too_small_is_refuted_by_the_attack() -> None:
    model, windows, targets = trained("contractive_linear")
    x = model.embedding(windows)
    clean = logits_of(model, x)
    correct = clean.argmax(-1) == targets
    constant = feature_constant(model)
    flips = [
        attack_at_radius(
            model, x, targets, clean, certified_radii(model, clean, correct, claimed), 30
        )
        for claimed in (constant, constant / 20)
    ]
    assert flips[0] == 0
    assert flips[1] > 0


def test_the_constant_is_never_below_what_two_inputs_show() -> None:
    model, windows, _ = trained("contractive_linear")
    x = model.embedding(windows)
    step = 1e-3 * unit(torch.randn_like(x))
    moved = model.stack(x + step) - model.stack(x)
    gain = moved.norm(dim=-1).amax(-1) / vector_norm(step, "token_max")
    assert (gain <= feature_constant(model)).all()


def test_for_a_linear_head_alone_the_radius_is_the_distance_to_the_boundary() -> None:
    model, _, _ = trained("contractive_linear")
    z = torch.randn(3, 4, model.head.in_features)
    logits = model.head(z)
    correct = torch.ones(3, 4, dtype=torch.bool)
    radii = certified_radii(model, logits, correct, 1.0)
    y = logits.argmax(-1)
    w = model.head.weight
    towards = w[None, None] - w[y].unsqueeze(-2)  # (windows, tokens, vocab, width)
    length = towards.norm(dim=-1)
    reach = (logits.amax(-1, keepdim=True) - logits) / length
    nearest = reach.nan_to_num(nan=math.inf).argmin(-1)
    direction = towards.take_along_dim(nearest[..., None, None], -2).squeeze(-2)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    for factor, stays in ((1 - 1e-6, True), (1 + 1e-6, False)):
        moved = model.head(z + factor * radii.unsqueeze(-1) * direction)
        assert ((moved.argmax(-1) == y) == stays).all()
    assert (certified_radii(model, logits, ~correct, 1.0) == 0).all()


def test_layer_norm_enters_the_constant_by_its_honest_bound() -> None:
    model = build_kind(tiny_case("contractive"))
    assert isinstance(model.norm, nn.LayerNorm)
    bound = read_out_constant(model)
    assert bound == pytest.approx(1 / math.sqrt(1e-5))
    for spread in (0.0, 1e-3, 1.0):  # tokens without variance attain it
        token = spread * torch.randn_like(model.norm.weight)
        jacobian = torch.func.jacrev(model.norm)(token)
        true = torch.linalg.matrix_norm(jacobian.double(), 2).item()
        assert (0.999 * bound if spread == 0 else 0) < true <= bound * (1 + 1e-6)
    assert read_out_constant(build_kind(tiny_case("contractive_linear"))) == 1


def test_pgd_stays_in_its_ball_and_does_worse_damage_than_random_steps() -> None:
    model, windows, targets = trained("contractive_linear")
    x = model.embedding(windows)
    radius = torch.linspace(0.0, 0.5, len(x))

    def lost(x: Tensor) -> Tensor:
        return -margins(logits_of(model, x), targets)[:, -1]

    moved = pgd(lost, x, radius, 10)
    step = radius[:, None, None] * unit(torch.randn_like(x))
    assert (vector_norm(moved - x, "token_max") <= radius).all()
    assert (lost(moved) >= lost(x)).all()
    assert (lost(moved)[1:] > lost(x + step)[1:]).all()


def test_a_beaten_certificate_is_called_a_bug_whatever_else_was_measured() -> None:
    case = tiny_case("contractive_linear")
    assert summarise([(case, examined())]).outcome == "not in the paper"
    beaten = replace(examined(), flips=[0.5, 1, 1, 1])
    assert summarise([(case, beaten)]).outcome == "not reproduced"


def test_a_lost_training_is_a_row_that_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny_case("contractive_linear")
    kept = examined()
    monkeypatch.setattr(robustness, "train_by_adam", lambda *_: [math.nan])
    lost = measure(case, CPU)
    (line,) = summarise([(case, lost), (replace(case, seed=1), kept)]).table
    assert line["accuracy"] == kept.accuracy
    assert "contractive_linear: 1 trainings lost" in str(summarise([(case, lost)]))
