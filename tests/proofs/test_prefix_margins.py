"""What states prove about a text: never more than is true, and all of it where rounding allows."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from flint import arb, ctx
from torch import Tensor, nn

from invformer.branches.feed_forward import enclosed as enclosed_feed_forward
from invformer.branches.feed_forward.activations import ACTIVATIONS, activation_slope
from invformer.branches.feed_forward.enclosed import activate
from invformer.branches.nearby import Rows
from invformer.nn import (
    ActivationNorm,
    ContractiveL2Attention,
    DotProductAttention,
    FeedForward,
    InvertibleStack,
)
from invformer.nn.coupling import CouplingStack
from invformer.nn.transformer import CharTransformer, PreNormBlock, PreNormStack
from invformer.numerics import enclosure
from invformer.numerics.enclosure import Enclosure, constant
from invformer.numerics.pairs import Pair, paired
from invformer.numerics.precision import denormals_flushed
from invformer.proofs import prefix_margins as prefix_module
from invformer.proofs.enclosed_network import Network
from invformer.proofs.nearby_network import NearbyNetwork
from invformer.proofs.prefix_margins import MarginEvidence, Networks, prefix_margins
from invformer.weights.position_bias import RelativePositionBias, VisibilityMask
from tests.support.builders import (
    SEQ_LEN,
    VOCAB,
    contractive_model,
    model_of_the_past,
    preset_model,
    random_tokens,
    small_model,
    trained_a_little,
)

ctx.prec = 200
exactly = np.vectorize(arb, otypes=[object])


def unconstrained(name: str, **options: Any) -> CharTransformer:
    """A tiny pre-norm model; of gelu only float64's digits are known."""
    return small_model(name=name, certificate=None, activation="silu", **options)


MODELS: dict[str, Callable[[], CharTransformer]] = {
    "l2": contractive_model,
    "l2 with channel scales": lambda: contractive_model(scaled=True),
    "l2, causal certificate": lambda: contractive_model(certificate="causal"),
    "unit ball": lambda: contractive_model(bounded=True, scaled=True),
    "unit ball, input radius": lambda: contractive_model(bounded=True, input_radius=3.0),
    "strictly causal, kernel 3": model_of_the_past,
    "l2 without a constraint": lambda: unconstrained("l2"),
    "twin": lambda: unconstrained("dot_product", feed_forward_kernel=3),
    "coupling": lambda: unconstrained("reversible"),
}


@torch.enable_grad()
def ready(make: Callable[[], CharTransformer]) -> CharTransformer:
    """A model after a few steps of training."""
    return trained_a_little(make()).eval()


def numbers(x: Tensor) -> np.ndarray:
    """A tensor's numbers, exactly."""
    return exactly(x.detach().double().numpy())


def exact_attention(branch, x: np.ndarray) -> np.ndarray:
    """Attention by its definition, row by row."""
    bias = numbers(branch.position(len(x)).clamp(min=-1e9))
    is_free = isinstance(branch, DotProductAttention)
    weights = None if is_free else branch.weights()
    heads = branch.num_heads if is_free else len(weights.g)
    total = 0
    for head in range(heads):
        own_bias = bias[head % len(bias)]
        if is_free:
            w_qkv = branch.qkv.weight.unflatten(0, (3, heads, -1))[:, head]
            q, k, v = (x @ numbers(w.mT) for w in w_qkv)
            g = branch.out.weight.mT.unflatten(0, (heads, -1))[head]
            tau = 1 / arb(q.shape[-1]).sqrt()
        elif hasattr(weights, "w_q"):
            q = k = v = x @ numbers(weights.w_q[head])
            g = weights.g[head]
        else:
            q, k, v = (exact_ball(x @ numbers(weights.w_qkv[part, head]), 1.0) for part in range(3))
            if branch.strictly_causal:
                k, v = (np.concatenate([0 * a[:1], a[:-1]]) for a in (k, v))
            g, tau = weights.g[head], arb(weights.temperature[head].item())
        rows = []
        for i in range(len(x)):
            if hasattr(weights, "w_q"):
                size = arb(q.shape[-1]).sqrt()
                logits = [-sum(a * a for a in q[i] - k[j]) / size for j in range(i + 1)]
            else:
                logits = [tau * (q[i] * k[j]).sum() for j in range(i + 1)]
            p = [(logit + own_bias[i, j]).exp() for j, logit in enumerate(logits)]
            rows.append(sum(a * b for a, b in zip(p, v, strict=False)) / sum(p))
        total = total + np.stack(rows) @ numbers(g)
    return total


def exact_ball(x: np.ndarray, radius: float) -> np.ndarray:
    """x/√(1 + ‖x‖²/R²)."""
    lengths = (x**2).sum(-1, keepdims=True) / arb(radius) ** 2 + 1
    return x / np.vectorize(lambda v: v.sqrt(), otypes=[object])(lengths)


def exact_norm(norm: nn.LayerNorm, x: np.ndarray) -> np.ndarray:
    """LayerNorm of every row."""
    x = x - x.sum(-1, keepdims=True) / x.shape[-1]
    variance = (x**2).sum(-1, keepdims=True) / x.shape[-1] + arb(norm.eps)
    deviation = np.vectorize(lambda v: v.sqrt(), otypes=[object])(variance)
    return x / deviation * numbers(norm.weight) + numbers(norm.bias)


def exact_feed_forward(branch, x: np.ndarray) -> np.ndarray:
    """silu((x, those before) W + b) V + c."""
    if isinstance(branch, FeedForward):
        w_in, b_in, w_out, c = (
            branch[0].weight.mT,
            branch[0].bias,
            branch[2].weight.mT,
            branch[2].bias,
        )
    else:
        (w_in, b_in, w_out, _), c = branch.weights(), torch.zeros(())
    before = [np.concatenate([0 * x[:lag], x[: len(x) - lag]]) for lag in range(branch.kernel)]
    hidden = np.concatenate(before, -1) @ numbers(w_in) + numbers(b_in)
    active = np.vectorize(lambda h: h / (1 + (-h).exp()), otypes=[object])(hidden)
    return active @ numbers(w_out) + numbers(c)


def exact_states(model: CharTransformer, tokens: Tensor) -> np.ndarray:
    """F(x) of one text in balls of 200 bits."""
    embedding = model.embedding
    x = numbers(embedding.token.weight[tokens]) + numbers(embedding.position[: len(tokens)])
    x = np.concatenate([x, exactly(np.zeros((len(x), embedding.padding)))], -1)
    if isinstance(model.stack, PreNormStack):
        couples = isinstance(model.stack, CouplingStack)
        x1, x2 = np.split(x, 2, -1) if couples else (x, x)
        for block in model.stack.blocks:
            x1 = x1 + exact_attention(block.attention.inner, exact_norm(block.attention.norm, x2))
            seen = exact_norm(block.feed_forward.norm, x1)
            x2 = (x2 if couples else x1) + exact_feed_forward(block.feed_forward.inner, seen)
            x1 = x1 if couples else x2
        return np.concatenate([x1, x2], -1) if couples else x2
    for _, layer in model.stack.layers():
        scaling = layer if isinstance(layer, ActivationNorm) else layer.scaling
        scale, shift = (1, 0) if scaling is None else map(numbers, scaling.weights()[1::2])
        u = x * scale + shift
        if isinstance(layer, ActivationNorm):
            x = u
            continue
        seen = u if layer.input_radius is None else exact_ball(u, layer.input_radius)
        attends = hasattr(layer.branch, "position")
        f = (exact_attention if attends else exact_feed_forward)(layer.branch, seen)
        x = x + f / scale
    return x


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> CharTransformer:
    """A trained model of every kind, in float32."""
    return ready(MODELS[request.param]).float()


@pytest.mark.parametrize("accurate", [True, False])
@torch.no_grad()
def test_enclosures_of_states_contain_those_in_200_bits(
    model: CharTransformer, accurate: bool
) -> None:
    (tokens,), places = random_tokens(1), torch.arange(SEQ_LEN)
    with torch.no_grad():
        network = Network(model, SEQ_LEN, accurate)
        own, past = network(tokens, places, None)
        other = (tokens + 1) % VOCAB
        state, _ = network(other, places, past)
        exact = exact_states(model, tokens)
        changed = tokens.clone()
        changed[5] = other[5]
        at_five = state[5]
        for found, true in ((own, exact), (at_five, exact_states(model, changed)[5])):
            found = paired(found)
            parts = (t.flatten().tolist() for t in (found.middle, found.low, found.radius))
            for middle, low, radius, value in zip(*parts, true.flatten(), strict=True):
                assert abs(value - arb(middle) - arb(low)) <= arb(radius)
        assert own.radius.max() < (1e-17 if accurate else 1e-8)


BY_ROWS = {
    **{name: MODELS[name] for name in ("l2", "l2 with channel scales", "l2, causal certificate")},
    "kernel 3": lambda: contractive_model(0.9, "causal", kernel=3, scaled=True),
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
    tokens = random_tokens(1)[0]
    places, rows = torch.arange(SEQ_LEN), torch.arange(SEQ_LEN * VOCAB)
    nearby, accurate = NearbyNetwork(Network(model, SEQ_LEN, False)), Network(model, SEQ_LEN, True)
    (own, kept), (true, past) = (f(tokens, places, None) for f in (nearby, accurate))
    pushed = [(own, true)]
    at = rows % VOCAB, rows // VOCAB
    pushed.append((nearby(*at, kept)[0], accurate(*at, past)[0]))
    for found, exact in pushed:
        exact = paired(exact)
        apart = (found.value - exact.middle - exact.low).norm(dim=-1)
        assert (apart <= found.error + exact.radius.double().norm(dim=-1)).all()
        assert size > 1 or (found.error < 1e-3 * found.value.norm(dim=-1)).all()
    # A wrong past, or a wrong symbol, is not within the error.
    assert (nearby(*at, kept)[0].value[:VOCAB] - own.value[0]).norm(dim=-1).amax() > 1e-3


def off_by(error: float, x: Tensor, units: Tensor | float) -> Rows:
    """Exact rows whose distance from x is ``error`` in these units, in some of the entries."""
    off = torch.randn_like(x) * torch.rand(x.shape[-1]).round()
    return Rows(x + error * units * off / off.norm(dim=-1, keepdim=True), 0 * x[..., 0])


@pytest.mark.parametrize("error", [1e-9, 1e-2, 1.0])
@pytest.mark.parametrize("name", BY_ROWS)
@torch.no_grad()
def test_rows_within_their_errors_stay_within_them_through_a_branch(
    name: str, error: float
) -> None:
    largest, everywhere = 0.0, torch.arange(SEQ_LEN)
    at = torch.tensor([3, 3, 7, SEQ_LEN - 1])
    for step in Network(ready(BY_ROWS[name]).double(), SEQ_LEN, False).steps:
        branch = step.branch
        assert branch.nearby is not None
        units: Any = 1.0 if branch.units is None else branch.units
        z = [torch.randn(SEQ_LEN, w.middle.shape[-1]) * units for w in branch.reads]
        rows = [torch.randn(4, t.shape[-1]) * units for t in z[: branch.num_reads]]
        known = [[Rows(t, 0 * t[:, 0] + error) for t in part] for part in (z, rows)]
        text, _, kept = branch.nearby(known[0], everywhere, None)
        found, _, _ = branch.nearby(known[1], at, kept)
        for _ in range(50):
            moved = [[off_by(error, t, units) for t in part] for part in (z, rows)]
            of_text, _, past = branch.nearby(moved[0], everywhere, None)
            of_rows, _, _ = branch.nearby(moved[1], at, past)
            for one, other in ((text, of_text), (found, of_rows)):
                apart = ((one.value - other.value) / units).norm(dim=-1)
                assert (apart <= one.error + 1e-13).all()
                largest = max(largest, (apart / one.error).max().item())
    assert largest > 0.02


@torch.no_grad()
def test_margins_are_the_same_if_every_number_of_every_symbol_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ready(MODELS["l2 with channel scales"])
    tokens = random_tokens(2)
    states = model.stack(model.embedding(tokens))
    networks = Networks(model, SEQ_LEN)
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


@pytest.mark.parametrize("relative", [1e-6, 1e-2])
def test_a_branch_of_any_input_in_an_enclosure_is_in_its_enclosure(
    model: CharTransformer, relative: float
) -> None:
    model = model.double()
    generator = torch.Generator().manual_seed(0)
    functions: list[Callable[[Tensor], Tensor]] = []
    with torch.no_grad():
        network = Network(model, SEQ_LEN)
        if isinstance(model.stack, InvertibleStack):
            weights = model.stack.weights()
            for name, layer in model.stack.residual_layers():
                functions.append(partial(layer.f, weights=weights[name].branch))
        else:
            functions += [b.inner for block in model.stack.blocks for b in block.children()]
    for f, step in zip(functions, network.steps, strict=True):
        x = torch.randn(SEQ_LEN, 12, generator=generator)
        radius = (relative * torch.rand(x.shape, generator=generator)).float()
        branch, seen = step.branch, Enclosure(x, radius)
        if step.makes is not None and isinstance(model.stack, InvertibleStack):
            seen = step.makes(seen)
        z = [seen.matmul(w) for w in branch.reads]
        inner, _ = branch.inner(z, torch.arange(SEQ_LEN), None)
        found = inner.matmul(branch.output)[:, branch.output.middle.any(0)]
        fullest = 0.0
        for place in range(SEQ_LEN):  # the corner that raises one entry most, to first order
            channel = place % 12
            at = x.clone().requires_grad_()
            f(at[None])[0, place, channel].backward()
            corner = f((x + at.grad.sign() * radius)[None]).detach()[0]
            away = (corner - found.middle).abs() - 1e-14
            assert (away <= found.radius).all()
            fullest = max(fullest, (away / found.radius)[place, channel].item())
        assert fullest > 0.1


@pytest.mark.parametrize("seed", [0, 1])
@torch.no_grad()
def test_errors_of_inner_numbers_are_carried_to_the_top(
    model: CharTransformer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that err as they say they may: states are off, and within their enclosures."""
    model = model.double()
    generator, size = torch.Generator().manual_seed(0), 1e-7
    right = enclosed_feed_forward.activate

    def wrong(x: Enclosure, activation: str) -> Enclosure:
        y = right(x, activation)
        error = size * (2 * torch.rand(y.middle.shape, generator=generator) - 1)
        return Enclosure(y.middle + error, y.radius + 1.001 * error.abs().float())

    monkeypatch.setattr(enclosed_feed_forward, "activate", wrong)
    (tokens,) = random_tokens(1, seed=seed)
    states = model.stack(model.embedding(tokens))
    with torch.no_grad():
        found, _ = Network(model, SEQ_LEN)(tokens, torch.arange(SEQ_LEN), None)
    away = (found.middle - states).abs()
    assert (away <= found.radius).all()
    assert away.max() > 0.1 * size
    # Through a LayerNorm an error is passed on entry by entry.
    least = 0.2 if isinstance(model.stack, InvertibleStack) else 0.004
    assert (away / found.radius).max() > least


@torch.no_grad()
def test_margins_are_those_of_every_symbol_at_every_place(model: CharTransformer) -> None:
    tokens = random_tokens(1)
    states = model.stack(model.embedding(tokens))
    found = prefix_margins(model, tokens, states, unknown=None)
    wide = model.double()
    own = wide.stack(wide.embedding(tokens))[0]
    for place in range(SEQ_LEN):
        others = tokens.repeat(VOCAB, 1)
        others[:, place] = torch.arange(VOCAB)
        apart = (wide.stack(wide.embedding(others))[:, place] - own[place]).norm(dim=-1)
        least = apart[torch.arange(VOCAB) != tokens[0, place]].min()
        assert found.margin[0, place] == pytest.approx(least.item(), rel=1e-4)
    assert found.proven.all()
    assert torch.equal(found.radius, (found.margin - found.distance).cummin(-1).values)
    assert (found.distance < 1e-3 * found.margin).all()


@torch.no_grad()
def test_no_text_but_the_proven_one_has_states_within_the_radius() -> None:
    model = ready(lambda: contractive_model(bounded=True, scaled=True))
    texts = torch.tensor(list(product(range(VOCAB), repeat=3)))
    states = model.stack(model.embedding(texts))
    generator = torch.Generator().manual_seed(0)
    proven = wrong = 0
    for noise in (0.0, 0.3, 1.0, 2.0):
        chosen = torch.randint(len(texts), (20,), generator=generator)
        damaged = states[chosen]
        damaged = damaged + noise * torch.randn(damaged.shape, generator=generator) / 3
        decoded = texts[(states[None] - damaged[:, None]).square().sum((-1, -2)).argmin(-1)]
        evidence = prefix_margins(model, decoded, damaged, unknown=None)
        away = (states[None] - damaged[:, None]).norm(dim=-1)  # (damaged, texts, places)
        for end in range(3):
            reach = (evidence.margin - evidence.distance)[:, None, : end + 1]
            inside = (away[..., : end + 1] < reach).all(-1)
            begins = (texts[None, :, : end + 1] == decoded[:, None, : end + 1]).all(-1)
            assert (begins | ~inside).all()
            assert torch.equal(evidence.radius[:, end], reach[:, 0].amin(-1))
            assert (inside.any(-1) | ~evidence.proven[:, end]).all()
        proven += int(evidence.proven.sum())
        wrong += int((evidence.proven & (decoded != texts[chosen])).sum())
    assert proven > 60
    assert wrong == 0


@torch.no_grad()
def test_a_text_is_found_from_its_rounded_states_alone(model: CharTransformer) -> None:
    tokens = random_tokens(2).clamp(min=1)
    states = model.stack(model.embedding(tokens))
    step = states.std() / 4
    nothing = torch.ones_like(tokens)
    rounded, within = (states / step).round() * step, step / 2 + 1e-6
    found = prefix_margins(model, nothing, rounded, fit=True, entries_within=within)
    assert torch.equal(found.tokens, tokens)
    assert found.proven.all()
    entries_within = torch.full_like(states[0, 0], 1e-4)
    states[:, :, :2], entries_within[:2] = math.nan, math.inf
    found = prefix_margins(model, nothing, states, fit=True, entries_within=entries_within)
    assert torch.equal(found.tokens, tokens)
    assert found.proven.all()


@torch.no_grad()
def test_a_text_is_found_where_rounding_is_bounded_too_loosely_to_prove_anything() -> None:
    model = preset_model("dot_product", 10).double().eval()
    tokens = random_tokens(1)
    states = model.stack(model.embedding(tokens))
    for start in (tokens, torch.zeros_like(tokens)):
        found = prefix_margins(model, start, states, fit=True)
        assert torch.equal(found.tokens, tokens)
        assert not found.proven.any()


@pytest.mark.parametrize(("kind", "size"), [
    ("rounded", 1.0), ("rounded", 3.0), ("rounded", 9.0), ("lost", 5), ("moved", 1.0),
    ("moved", 3.0), ("moved", 9.0), ("both", 3.0),
])  # fmt: skip
@torch.no_grad()
def test_proven_by_known_damage_is_what_no_other_text_may_be(kind: str, size: float) -> None:
    model = ready(lambda: contractive_model(bounded=True, scaled=True)).double()
    texts = torch.tensor(list(product(range(VOCAB), repeat=3)))
    states = model.stack(model.embedding(texts))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(texts), (40,), generator=generator)
    damaged, known = states[chosen], {}
    if kind == "rounded":
        damaged = (damaged / size).round() * size
        known["entries_within"] = torch.full_like(damaged[:1, :1], size / 2 + 1e-9)
    elif kind == "lost":
        known["entries_within"] = torch.full_like(damaged, 1e-9)
        damaged[..., : int(size)], known["entries_within"][..., : int(size)] = 0, math.inf
    else:
        moved = torch.randn(damaged.shape, generator=generator).double()
        damaged = damaged + size * moved / moved.norm(dim=-1, keepdim=True)
        known["states_within"] = size + 1e-9
    if kind == "both":  # and of the first entries nothing else is known
        known["entries_within"] = torch.full_like(damaged, size / 2)
        known["entries_within"][..., :8] = math.inf
    decoded = texts[chosen]
    decoded[::2, 1] = (decoded[::2, 1] + 1) % VOCAB  # every second is wrong
    evidence = prefix_margins(model, decoded, damaged, unknown=None, **known)
    off = states[None] - damaged[:, None]  # (damaged, texts, places, width)
    entries = known.get("entries_within", torch.full_like(damaged, math.inf))[:, None]
    near = (off.abs() <= entries).all(-1) & (
        off.norm(dim=-1) <= known.get("states_within", math.inf)
    )
    same = (texts[None] == decoded[:, None]).cumprod(-1).bool()
    expected = torch.ones(len(decoded)).bool()
    for end in range(3):
        assert (same[..., end] | ~near[..., : end + 1].all(-1))[evidence.proven[:, end]].all()
        behind = same[..., end - 1] if end else torch.ones_like(same[..., 0])
        expected &= (~behind | (near[..., end] == same[..., end])).all(-1)
        assert torch.equal(evidence.proven[:, end], expected)
    assert not evidence.proven[::2, 1:].any()
    assert evidence.proven.any() == ((kind, size) != ("rounded", 9.0))


@torch.no_grad()
def test_numbers_get_more_digits_where_float64_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = ready(model_of_the_past), random_tokens(3)
    states = model.stack(model.embedding(tokens))
    fast = prefix_margins(model, tokens, states, unknown=None)
    monkeypatch.setattr(prefix_module, "ENOUGH", 1e30)
    accurate = prefix_margins(model, tokens, states, unknown=None)
    assert (accurate.arithmetic_error < 0.01 * fast.arithmetic_error).all()
    assert torch.allclose(accurate.margin, fast.margin)
    assert fast.proven.all()
    assert accurate.proven.all()


@torch.no_grad()
def test_who_watches_a_proof_sees_what_is_proven_of_every_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_module, "ROWS", 2 * VOCAB)
    model, tokens = ready(model_of_the_past), random_tokens(2)
    states = model.stack(model.embedding(tokens))
    seen: list[MarginEvidence] = []
    whole = prefix_margins(model, (tokens + 1) % VOCAB, states, fit=True, watch=seen.append)
    assert torch.equal(whole.tokens, tokens)
    ends = [*range(2, SEQ_LEN, 2), SEQ_LEN]
    assert [len(part.tokens) for part in seen] == ends * 2
    for index, part in enumerate(seen):
        text, end = divmod(index, len(ends))
        for name in ("margin", "distance", "radius", "proven", "tokens"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[text, : ends[end]])


@pytest.mark.parametrize("place", [0, 5, SEQ_LEN - 1])
@torch.no_grad()
def test_a_wrong_symbol_is_not_proven_nor_what_follows_it(place: int) -> None:
    model = ready(model_of_the_past)
    tokens = random_tokens(2)
    states = model.stack(model.embedding(tokens))
    tokens[0, place] = (tokens[0, place] + 1) % VOCAB
    proven = prefix_margins(model, tokens, states, unknown=None).proven
    assert proven[0].tolist() == [index < place for index in range(SEQ_LEN)]
    assert proven[1].all()


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 3e-45), (torch.float64, 1e-160), (torch.float64, 1e-310),
     (torch.bfloat16, 1e-40), (torch.float32, 1e-34)],
)  # fmt: skip
@torch.no_grad()
def test_symbols_that_underflow_are_not_proven(dtype: torch.dtype, scale: float) -> None:
    model = ready(contractive_model).to(dtype)
    model.embedding.token.weight.mul_(0).add_(torch.arange(VOCAB)[:, None].to(dtype) * scale)
    tokens = random_tokens(2)
    with denormals_flushed():
        states = model.stack(model.embedding(tokens))
        assert not prefix_margins(model, tokens, states, unknown=None).proven.any()


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e200])
@torch.no_grad()
def test_numbers_that_are_none_prove_nothing(number: float) -> None:
    model = ready(contractive_model)
    tokens = random_tokens(1)
    states = model.stack(model.embedding(tokens))
    states[0, 3, 2] = number
    proven = prefix_margins(model, tokens, states, unknown=None).proven[0]
    assert proven.tolist() == [place < 3 for place in range(SEQ_LEN)]
    model.stack.blocks[1].feed_forward.branch.b_in[1] = number
    states = model.stack(model.embedding(tokens))
    assert not prefix_margins(model, tokens, states, unknown=None).proven.any()


class Doubled(ContractiveL2Attention):
    """Twice what the class above it computes."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return 2 * super().forward(*args, **options)


def sees_ahead() -> CharTransformer:
    model = contractive_model()
    mask = VisibilityMask(torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool))
    model.stack.blocks[0].attention.branch.position = mask
    return model


def doubled() -> CharTransformer:
    model = contractive_model()
    model.stack.blocks[0].attention.branch.__class__ = Doubled
    return model


class Twice(PreNormBlock):
    """Both branches, applied again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def twice() -> CharTransformer:
    model = unconstrained("dot_product")
    model.stack.blocks[1].__class__ = Twice
    return model


class Downwards(PreNormStack):
    """The blocks from the top down."""

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def downwards() -> CharTransformer:
    model = unconstrained("dot_product")
    model.stack.__class__ = Downwards
    return model


def without_a_mean() -> CharTransformer:
    model = unconstrained("dot_product")
    model.stack.blocks[1].feed_forward.norm = nn.RMSNorm(12)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (downwards, "the rounding of a Downwards is not bounded"),
        (twice, "the rounding of a Twice is not bounded"),
        (without_a_mean, "the rounding of a RMSNorm is not bounded"),
        (sees_ahead, "see later ones"),
        (doubled, "block_00/attention: the rounding of a Doubled is not bounded"),
    ],
)
@torch.no_grad()
def test_other_models_are_not_proven_and_say_why(
    make: Callable[[], CharTransformer], reason: str
) -> None:
    model, tokens = make().eval(), random_tokens(1)
    evidence = prefix_margins(model, tokens, model.stack(model.embedding(tokens)))
    assert not evidence.proven.any()
    assert reason in evidence.unproven


ACTIVATION = {
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "tanh": mpmath.tanh,
}


@pytest.mark.parametrize("name", ["exp", "rsqrt", *ACTIVATION])
def test_the_library_errs_by_less_than_half_of_what_is_assumed_of_it(name: str) -> None:
    x = 6 * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, torch.linspace(-30, 30, 1001)]) + 1e-9
    x = x.abs() if name == "rsqrt" else x
    function = {"exp": torch.exp, "rsqrt": torch.rsqrt, **ACTIVATIONS}[name]
    oracle = {"exp": mpmath.exp, "rsqrt": lambda v: 1 / mpmath.sqrt(v), **ACTIVATION}[name]
    allowed = enclosure.EXP if name in ("exp", "rsqrt") else enclosed_feed_forward.ACTIVATION_ERROR
    with mpmath.workdps(40):
        for v, found in zip(x.tolist(), function(x).tolist(), strict=True):
            exact = oracle(mpmath.mpf(v))
            scale = abs(mpmath.mpf(v)) if name == "gelu" else abs(exact)
            assert abs(found - exact) <= allowed / 2 * scale


@pytest.mark.parametrize("name", list(ACTIVATION))
def test_slopes_and_curvatures_bound_those_of_the_activations(name: str) -> None:
    x = torch.linspace(-40, 40, 400_000)
    slope = activation_slope(name, x)
    assert slope.abs().max() <= enclosed_feed_forward.SLOPE[name]
    assert (
        activation_slope(name, x.float()) - slope
    ).abs().max() <= enclosed_feed_forward.SLOPE_ERROR / 2
    if name != "relu":
        assert (slope.diff() / x.diff()).abs().max() <= enclosed_feed_forward.CURVATURE[name]


@pytest.mark.parametrize("relative", [1e-9, 1e-2, 1.0])
@pytest.mark.parametrize("name", list(ACTIVATION))
def test_an_activation_of_any_number_in_an_enclosure_is_in_its_enclosure(
    name: str, relative: float
) -> None:
    x = 4 * torch.randn(2000, generator=torch.Generator().manual_seed(1))
    radius = (relative * (x.abs() + 0.1)).float()
    found = activate(Enclosure(x, radius), name)
    for share in torch.linspace(-1, 1, 9):
        value = ACTIVATIONS[name](x + share * radius)
        assert ((value - found.middle).abs() <= found.radius + 1e-15).all()


@pytest.mark.parametrize("name", list(ACTIVATION))
def test_an_activation_of_a_pair_is_enclosed_with_more_digits_if_it_is_silu_or_relu(
    name: str,
) -> None:
    x = torch.cat([torch.linspace(-300, 300, 101), torch.linspace(-6, 6, 101) + 1e-9])
    found = activate(paired(constant(x)), name)
    with mpmath.workdps(60):
        for place, number in enumerate(x.tolist()):
            middle = mpmath.mpf(found.middle[place].item())
            if isinstance(found, Pair):
                middle += mpmath.mpf(found.low[place].item())
            away = abs(ACTIVATION[name](mpmath.mpf(number)) - middle)
            assert away <= found.radius[place].item()
    assert isinstance(found, Pair) == (name in ("silu", "relu"))
    if isinstance(found, Pair):
        assert (found.radius <= 2.0**-79 * found.middle.abs() + 2.0**-98 * (1 + x.abs())).all()


def test_relu_of_no_number_is_no_number() -> None:
    zero = torch.zeros(1)
    found = activate(Pair(zero * math.nan, zero.float(), zero), "relu")
    assert found.middle.isnan().all()


@pytest.mark.parametrize("number", [math.inf, 1e9])
@torch.no_grad()
def test_a_bias_that_is_infinite_or_a_large_weight_proves_nothing(number: float) -> None:
    model, tokens = ready(contractive_model), random_tokens(1)
    states = model.stack(model.embedding(tokens))
    model.stack.blocks[0].attention.branch.position.table[0, 0] = number
    assert not prefix_margins(model, tokens, states, unknown=None).proven.any()


def test_relu_passes_on_an_enclosure_that_reaches_just_beyond_zero() -> None:
    x = Enclosure(torch.tensor([-1.0]), torch.tensor([1 + 2.0**-23], dtype=torch.float32))
    assert activate(x, "relu").radius >= 2.0**-23
