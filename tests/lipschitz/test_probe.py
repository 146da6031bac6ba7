"""Every branch's Jacobian at the probe text, stacked: each branch's own, in few launches."""

import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from invformer.branches.feed_forward.feed_forward import ACTIVATIONS
from invformer.config.load import CONFIGS
from invformer.evaluation.lipschitz import require_sandwich
from invformer.lipschitz.probe import LipschitzProbe, Measured, certified_in
from invformer.nn import CharTransformer, ContractiveFeedForward, VisibilityMask
from invformer.numerics.norms import NORMS
from invformer.weights.spectral import refresh_normalisers, set_manual_refresh
from tests.support.builders import (
    SEQ_LEN,
    WIDTH,
    baseline,
    contractive_model,
    convolutional_baseline,
    coupling,
    l2_baseline,
    model_of_the_past,
    preset_model,
    random_tokens,
    scaled_model,
    small_model,
    train,
    trained_a_little,
)
from tests.support.host_syncs import HostSyncs
from tests.support.launches import Launches
from tests.support.problems import dense_jacobian, diagonal_norm, norm_from_below


def windowed_baseline() -> CharTransformer:
    """A baseline whose first block sees one token back, the second two: masks no file keeps."""
    model = baseline()
    for index, block in enumerate(model.stack.blocks):
        near = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril().triu(-1 - index)
        block.attention.inner.position = VisibilityMask(near)
    return model


class Louder(ContractiveFeedForward):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(*inputs)


def louder_model() -> CharTransformer:
    """A model with a forward pass that a known class does not have."""
    model = contractive_model()
    for block in model.stack.blocks:
        block.feed_forward.branch.__class__ = Louder
    return model


MODELS = {
    "actnorm": contractive_model,
    "plain": lambda: contractive_model(norm=False),
    "bounded": lambda: contractive_model(bounded=True),
    "causal": lambda: contractive_model(certificate="causal"),
    "past": model_of_the_past,
    "weighted": scaled_model,
    "weighted past": partial(scaled_model, kernel=3),
    "weighted in a ball": lambda: scaled_model(
        bounded=False, strictly_causal=False, certificate="token_max", input_radius=1.5
    ),
    "dot product": baseline,
    "windows": windowed_baseline,
    "l2": l2_baseline,
    "convolution": convolutional_baseline,
    "louder": louder_model,
    "coupling": coupling,
}


def dense(model, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """∂f_i/∂x_j of every branch, as (N, D, N, D)."""
    x = model.embedding(tokens).detach()
    found = {}
    for name, layer in model.stack.layers() if model.is_invertible else []:
        if hasattr(layer, "branch"):
            at = x if layer.scaling is None else layer.scaling(x)
            found[name] = dense_jacobian(layer.f, at[0].detach())
        x = layer(x).detach()
    if not model.is_invertible:

        def apply(branch, x: torch.Tensor) -> torch.Tensor:
            name = names[branch].removeprefix("stack.blocks.")
            found[f"block_0{name.replace('.', '/')}"] = dense_jacobian(branch, x[0].detach())
            return branch(x)

        names = {module: name for name, module in model.named_modules()}
        for block in model.stack.blocks:
            x = block.compose(x, apply)
    return {n: j.detach().view(SEQ_LEN, WIDTH, SEQ_LEN, WIDTH) for n, j in found.items()}


def test_blocks_of_other_kinds_or_shapes_or_that_compute_something_else_are_refused() -> None:
    kind, shape = louder_model(), contractive_model()
    kind.stack.blocks[0].feed_forward.branch.__class__ = ContractiveFeedForward
    shape.stack.blocks[0].feed_forward.branch = ContractiveFeedForward(WIDTH, 5, 0.7)
    activation, strict, radius = (contractive_model(bounded=True) for _ in range(3))
    activation.stack.blocks[1].feed_forward.branch.activation = "tanh"
    strict.stack.blocks[1].attention.branch.strictly_causal = True
    radius.stack.blocks[1].attention.input_radius = 50.0
    for model in (kind, shape, activation, strict, radius):
        with pytest.raises(ValueError, match="layers of different kinds or shapes"):
            LipschitzProbe(model, random_tokens(1))


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_dense_jacobian_of_every_branch(name: str) -> None:
    model = trained_a_little(MODELS[name]())
    tokens = random_tokens(1, seed=3)
    probe, true = LipschitzProbe(model, tokens), dense(model, tokens)
    assert sorted(probe.names) == sorted(true)
    chosen = torch.tensor([0, 4, SEQ_LEN - 1])
    for part, stacked in zip(probe.parts, probe.stacked(), strict=True):
        count = len(part.branches)
        j = torch.stack([true[branch] for branch in part.names])
        v = torch.randn(count, len(chosen), SEQ_LEN, WIDTH)
        k = chosen.expand(count, 1, -1)
        cases = [(stacked.rows(k), "bkdje,bkje->bkd", j[:, chosen], v)]
        if certified_in(model) == "diagonal_block":
            own = v[:, torch.arange(3), chosen].unsqueeze(2)
            blocks = j.diagonal(dim1=1, dim2=3)[..., chosen]
            cases += [(stacked.rows(k, diagonal=True), "bdek,bkje->bkd", blocks, own)]
        for products, equation, matrix, vectors in cases:
            if products.vjp(torch.zeros(count, 3, WIDTH)).shape[2] == 1:  # the token itself
                vectors = v[:, torch.arange(3), chosen].unsqueeze(2)
                if matrix.ndim == 5:
                    matrix = torch.stack([matrix[:, i, :, t] for i, t in enumerate(chosen)], -1)
                    equation = "bdek,bkje->bkd"
            expected = torch.einsum(equation, matrix, vectors)
            pushed = products.jvp(vectors.clone())
            torch.testing.assert_close(pushed, expected, rtol=1e-6, atol=1e-9)
            w = torch.randn(pushed.shape)
            torch.testing.assert_close((products.vjp(w) * vectors).sum(), (w * pushed).sum())


@pytest.mark.parametrize("name", MODELS)
def test_estimates_approach_the_dense_constant_below_local_bounds(name: str) -> None:
    model = trained_a_little(MODELS[name](), steps=10)
    tokens = random_tokens(1, seed=3)
    true = dense(model, tokens)
    norms: dict[Measured, Callable[[torch.Tensor], float]] = {
        norm: partial(norm_from_below, norm=norm) for norm in NORMS
    }
    if certified_in(model) == "diagonal_block":
        norms["diagonal_block"] = diagonal_norm
    for measured, norm in norms.items():
        probe = LipschitzProbe(model, tokens, measured)
        estimates = probe.estimate(num_steps=30)
        for branch, (value, _) in estimates.items():
            expected = norm(true[branch])
            assert value.item() <= expected
            near = 0.3 if measured == "entry_max" else 1e-2  # signs stop at local maxima
            assert value.item() == pytest.approx(expected, rel=near)
        if measured == certified_in(model):
            for branch, bound in zip(probe.names, probe.local_bounds().tolist(), strict=True):
                assert norm(true[branch]) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_activation_lifts_an_estimate_above_a_bound(activation: Any, dtype: torch.dtype) -> None:
    model = small_model(name="contractive_l2", activation=activation, initial_sharpness=30.0)
    model.initialise(random_tokens(8))
    model.to(dtype)
    probe = LipschitzProbe(model, random_tokens(2))
    for size in (0.0, 0.75, 20.0, 500.0):  # with 0.75 gelu's slope changes its sign
        for signs in (-1.0, 1.0, torch.randn(2 * WIDTH).sign()):
            for block in model.stack.blocks:
                block.feed_forward.branch.b_in.data[:] = size / 30 * signs
            stacked = probe.stacked()
            beside = probe.values(None, stacked), probe.local_bounds(stacked=stacked)
            for name, low, high in zip(probe.names, *beside, strict=True):
                require_sandwich(name, {"estimate": low.item(), "local_bound": high.item()})


@pytest.mark.parametrize("measured", [None, "frobenius"])
@pytest.mark.parametrize("name", ["weighted", "weighted past", "bounded", "actnorm"])
def test_weights_of_a_step_give_equal_estimates(name: str, measured: Measured | None) -> None:
    """In training, scalings of the channels are folded into the weights of the branches."""
    model = trained_a_little(MODELS[name]()).train()
    set_manual_refresh(model)
    refresh_normalisers(model)
    tokens = random_tokens(2)
    probes = [LipschitzProbe(model, tokens, measured) for _ in range(2)]
    for _ in range(3):
        values = probes[0].values(), probes[1].values(weights=model.weights(folded=True))
        torch.testing.assert_close(*values, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["weighted in a ball", "past", "dot product"])
def test_measuring_leaves_model_and_random_numbers_alone_and_repeats(name: str) -> None:
    model = MODELS[name]()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    values = [LipschitzProbe(model, random_tokens(1)).values() for _ in range(2)]
    assert torch.equal(*values)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_estimate_that_leaves_a_probe_unchanged_does_not_start_it() -> None:
    model, tokens = trained_a_little(contractive_model()), random_tokens(1)
    probe, fresh = LipschitzProbe(model, tokens), LipschitzProbe(model, tokens)
    with probe.unchanged():
        probe.values()
    assert torch.equal(probe.values(), fresh.values())


def test_a_saved_probe_goes_on_as_if_never_saved() -> None:
    model = trained_a_little(scaled_model())
    probe, other = (LipschitzProbe(model, random_tokens(1)) for _ in range(2))
    probe.values()
    other.load_state_dict({name: tensor.clone() for name, tensor in probe.state_dict().items()})
    assert torch.equal(probe.values(), other.values())
    other_shape = LipschitzProbe(model, random_tokens(2)).state_dict()
    other_type = {name: tensor.float() for name, tensor in probe.state_dict().items()}
    for state in (other_shape, other_type, {"others": torch.zeros(1)}):
        with pytest.raises(ValueError, match="do not fit"):
            other.load_state_dict(state)


@pytest.mark.parametrize("preset", sorted(p.stem for p in (CONFIGS / "model").glob("*.yaml")))
def test_an_estimate_takes_few_launches_the_same_at_any_depth(monkeypatch, preset: str) -> None:
    monkeypatch.setattr("invformer.lipschitz.compiled.can_take", lambda *_: False)
    norms = ["frobenius", "entry_max"] if preset == "contractive_l2_paper" else [None]
    for measured in norms:
        counts = {}
        for num_layers in (2, 6):
            model = preset_model(preset, num_layers)
            probe = LipschitzProbe(model, random_tokens(1)[:, :8], measured)
            weights = model.weights(folded=True)
            probe.values(weights=weights)
            with Launches() as forward:
                probe.stacked(weights)
            with Launches() as launches, HostSyncs() as syncs:
                probe.values(weights=weights)
            assert syncs.found == []
            counts[num_layers] = launches.count - forward.count
        assert counts[6] <= counts[2] <= 2 * 190


def test_estimates_along_a_training_run_are_close_to_converged_ones() -> None:
    """float32 against float64, with steps that are larger than those of a real training."""
    torch.manual_seed(1)
    model = contractive_model().float()
    set_manual_refresh(model)
    tokens = random_tokens(1, seed=99)
    probe = LipschitzProbe(model, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    errors = []
    for step in range(120):
        train(model, optimizer, [step])
        refresh_normalisers(model)
        values = probe.values()
        if step in (39, 79, 119):
            true = dense(copy.deepcopy(model).double().eval(), tokens)
            for name, value in zip(probe.names, values.tolist(), strict=True):
                exact = norm_from_below(true[name], "token_max")
                assert value <= exact
                errors.append(1 - value / exact)
    assert statistics.median(errors) < 0.01


def test_a_thorough_probe_advances_every_token_of_maps_of_single_tokens(monkeypatch) -> None:
    monkeypatch.setattr("invformer.lipschitz.probe.TOKENS_AT_ONCE", 8)
    model, tokens = trained_a_little(contractive_model()), random_tokens(1, seed=3)
    true = dense(model, tokens)
    probe = LipschitzProbe(model, tokens, thorough=True)
    assert [part.iteration.slots.shape[-1] for part in probe.parts] == [8, SEQ_LEN]
    for name, (value, _) in probe.estimate(num_steps=60).items():
        if "feed_forward" in name:
            assert value.item() == pytest.approx(norm_from_below(true[name], "token_max"), rel=1e-4)
