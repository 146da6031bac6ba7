"""Networks in plain rows: nowhere off by more than they say."""

from typing import Any

import pytest
import torch
from torch import Tensor

from invformer.branches.enclosed import EnclosedBranch
from invformer.branches.nearby import Rows
from invformer.numerics.enclosure import Enclosure, constant
from invformer.numerics.pairs import paired
from invformer.proofs.enclosed_network import Network
from invformer.proofs.nearby_network import NearbyNetwork
from invformer.proofs.prefix_margins import Networks, prefix_margins
from invformer.weights.position_bias import RelativePositionBias
from tests.proofs.models import MODELS, ready
from tests.support import builders

BY_ROWS = {
    **{name: make for name, make in MODELS.items() if name[:2] == "l2" and "without" not in name},
    "kernel 3": lambda: builders.contractive_model(0.9, "causal", kernel=3, scaled=True),
    "l2, no bias": lambda: builders.contractive_model(position_bias=False),
    "unit ball": MODELS["unit ball"],
    "unit ball, no bias": lambda: builders.contractive_model(bounded=True, position_bias=False),
    "strictly causal, kernel 3": builders.model_of_the_past,
}


@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("name", BY_ROWS)
@torch.no_grad()
def test_states_by_rows_are_as_near_to_exact_ones_as_they_say(name: str, size: float) -> None:
    model = ready(BY_ROWS[name]).double()
    model.embedding.token.weight *= size
    for _, layer in model.stack.residual_layers():
        if layer.scaling is not None:
            layer.scaling.log_scale += torch.randn_like(layer.scaling.log_scale)
        if isinstance(position := getattr(layer.branch, "position", None), RelativePositionBias):
            position.table += size * torch.randn_like(position.table)
    tokens, rows = builders.random_tokens(1)[0], torch.arange(builders.SEQ_LEN * builders.VOCAB)
    network, accurate = (Network(model, builders.SEQ_LEN, exactly) for exactly in (False, True))
    nearby = NearbyNetwork(network)
    text = tokens, torch.arange(builders.SEQ_LEN), None
    past, at = nearby.remembered(network(*text)[1]), (rows % builders.VOCAB, rows // builders.VOCAB)
    found, exact = nearby(*at, past)[0], paired(accurate(*at, accurate(*text)[1])[0])
    apart = (found.value - exact.middle - exact.low).norm(dim=-1)
    assert (apart <= found.error + exact.radius.double().norm(dim=-1)).all()
    assert size > 1 or (found.error < 1e-3 * found.value.norm(dim=-1)).all()
    # Another symbol is not within the error.
    assert (found.value[0] - found.value[1 : builders.VOCAB]).norm(dim=-1).amax() > 1e-3


def off_by(error: float, x: Tensor, units: Tensor | float) -> Rows:
    """Exact rows whose distance from x is ``error`` in these units, in some of the entries."""
    off = torch.randn_like(x) * torch.rand(x.shape[-1]).round()
    return Rows(
        x + error * units * off / off.norm(dim=-1, keepdim=True).clamp_min(1e-9), 0 * x[..., 0]
    )


@pytest.mark.parametrize("error", [1e-9, 1e-2, 1.0])
@pytest.mark.parametrize("name", BY_ROWS)
@torch.no_grad()
def test_rows_within_errors_stay_within_them_through_a_branch(name: str, error: float) -> None:
    largest, everywhere = 0.0, torch.arange(builders.SEQ_LEN)
    at = torch.tensor([3, 3, 7, builders.SEQ_LEN - 1])
    for step in Network(ready(BY_ROWS[name]).double(), builders.SEQ_LEN, False).steps:
        branch, count = step.branch, step.branch.num_reads
        units: list[Any] = [1.0 if u is None else u for u in branch.read_units]
        sizes = [w.middle.shape[-1] for w in branch.reads]
        units += [1.0] * (len(sizes) - len(units))
        z = [torch.randn(builders.SEQ_LEN, n) * u for n, u in zip(sizes, units, strict=True)]
        rows = [torch.randn(4, n) * u for n, u in zip(sizes[:count], units[:count], strict=True)]
        radius = [
            (error / len(t[0]) * u * torch.rand_like(t)).float()
            for t, u in zip(z, units, strict=True)
        ]

        def past(moved: list[Tensor], radius: list[Tensor], branch: EnclosedBranch = branch) -> Any:
            text = [Enclosure(*pair) for pair in zip(moved, radius, strict=True)]
            return branch.remembered(branch.inner(text, everywhere, None)[1])

        found, _ = branch.nearby([Rows(t, 0 * t[:, 0] + error) for t in rows], at, past(z, radius))
        inner = torch.ones(1) if branch.units is None else branch.units
        for share in torch.linspace(0, 1, 9).tolist():
            moved = [t + torch.randn_like(t).sign() * r for t, r in zip(z, radius, strict=True)]
            of_rows = [
                off_by(share * error, t, u) for t, u in zip(rows, units[:count], strict=True)
            ]
            exact, _ = branch.nearby(of_rows, at, past(moved, [0 * r for r in radius]))
            apart = ((found.value - exact.value) / inner).norm(dim=-1)
            assert (apart <= found.error + 1e-13 / inner.min()).all()
            largest = max(largest, (apart / found.error).max().item())
    assert largest > 0.02


@torch.no_grad()
def test_errors_do_not_grow_with_the_distance_of_keys_that_have_no_weight() -> None:
    step = Network(ready(BY_ROWS["l2"]).double(), builders.SEQ_LEN, False).steps[0]
    everywhere, error = torch.arange(builders.SEQ_LEN), 1e-9
    z = 100 * torch.randn(builders.SEQ_LEN, step.branch.reads[0].middle.shape[-1])
    past = step.branch.inner([constant(z)], everywhere, None)[1]
    rows = Rows(z, torch.full_like(z[:, 0], error))
    found, _ = step.branch.nearby([rows], everywhere, step.branch.remembered(past))
    assert (found.error < 2 * error).all()


@torch.no_grad()
def test_margins_are_the_same_if_every_number_of_every_symbol_is_bounded(monkeypatch) -> None:
    model = ready(MODELS["l2 with channel scales"])
    tokens = builders.random_tokens(2)
    states = model.stack(model.embedding(tokens))
    networks = Networks(model, builders.SEQ_LEN)
    assert networks.nearby is not None
    for fit, within in ((False, None), (True, 0.3)):
        options: dict[str, Any] = {"fit": fit, "states_within": within}
        fast = prefix_margins(networks, tokens, states, **options)
        with monkeypatch.context() as patch:
            patch.setattr(NearbyNetwork, "is_possible", staticmethod(lambda network: False))
            slow = prefix_margins(model, tokens, states, **options)
        assert torch.allclose(fast.margin, slow.margin, rtol=1e-6)
        assert torch.equal(fast.proven, slow.proven)
        assert torch.equal(fast.tokens, slow.tokens)
