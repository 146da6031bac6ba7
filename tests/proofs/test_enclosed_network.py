"""Networks in enclosures, held against 200 bits and against errors that are put in."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from flint import arb, ctx
from torch import Tensor, nn

from invformer.branches.feed_forward import enclosed as enclosed_feed_forward
from invformer.nn import ActivationNorm, DotProductAttention, FeedForward, InvertibleStack
from invformer.nn.coupling import CouplingStack
from invformer.nn.transformer import CharTransformer, PreNormStack
from invformer.numerics.enclosure import Enclosure
from invformer.numerics.pairs import paired
from invformer.proofs.enclosed_network import Network
from tests.support.builders import SEQ_LEN, VOCAB, random_tokens

ctx.prec = 200
exactly = np.vectorize(arb, otypes=[object])


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
        w_in, b_in, c = branch[0].weight.mT, branch[0].bias, branch[2].bias
        w_out = branch[2].weight.mT
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


@pytest.mark.parametrize("accurate", [True, False])
@torch.no_grad()
def test_enclosed_states_contain_those_in_200_bits(model, accurate: bool) -> None:
    (tokens,), places = random_tokens(1), torch.arange(SEQ_LEN)
    network = Network(model, SEQ_LEN, accurate)
    own, past = network(tokens, places, None)
    other = (tokens + 1) % VOCAB
    state, _ = network(other, places, past)
    changed = tokens.clone()
    changed[5] = other[5]
    for enclosed, true in (
        (own, exact_states(model, tokens)),
        (state[5], exact_states(model, changed)[5]),
    ):
        found = paired(enclosed)
        parts = (t.flatten().tolist() for t in (found.middle, found.low, found.radius))
        for middle, low, radius, value in zip(*parts, true.flatten(), strict=True):
            assert abs(value - arb(middle) - arb(low)) <= arb(radius)
    assert own.radius.max() < (1e-17 if accurate else 1e-8)


@pytest.mark.parametrize("relative", [1e-6, 1e-2])
def test_a_branch_of_an_enclosure_is_enclosed(model, relative: float) -> None:
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
def test_inner_errors_are_carried_to_the_top(model, seed: int, monkeypatch) -> None:
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
    found, _ = Network(model, SEQ_LEN)(tokens, torch.arange(SEQ_LEN), None)
    away = (found.middle - states).abs()
    assert (away <= found.radius).all()
    assert away.max() > 0.1 * size
    # Through a LayerNorm an error is passed on entry by entry.
    least = 0.2 if isinstance(model.stack, InvertibleStack) else 0.004
    assert (away / found.radius).max() > least
