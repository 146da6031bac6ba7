"""Residual branches in enclosures of real numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from invformer.branches.dot_product.attention import DotProductAttention
from invformer.branches.feed_forward.feed_forward import (
    ACTIVATIONS,
    Activation,
    ContractiveFeedForward,
    FeedForward,
    activation_slope,
)
from invformer.branches.in_ball.attention import BoundedAttention
from invformer.branches.tied_l2.attention import L2Weights, TiedL2Attention
from invformer.numerics import enclosure
from invformer.numerics.enclosure import Enclosure, Matrix, constant, length_up, outward, size
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.pairs import Pair, paired
from invformer.numerics.precision import is_denormal
from invformer.numerics.token_shift import delay
from invformer.weights.position_bias import VisibilityMask

# Relative error assumed of the library's activations: 8 ulp.
ACTIVATION_ERROR = 2.0**-49
# ≥ sup |φ″|, and ≥ sup |φ′|.
CURVATURE = {"silu": 0.5001, "gelu": 0.7980, "relu": math.inf, "tanh": 0.7699}
SLOPE = {"silu": 1.0999, "gelu": 1.1290, "relu": 1.0, "tanh": 1.0}
# Up to here what may underflow in a radius, times anything, is below what is added to each.
LARGEST = 2.0**26
# Covers the rounding of φ′ in float32.
SLOPE_ERROR = 2.0**-16


class NotEnclosed(ValueError):
    """The rounding of this network is not bounded; the message says why."""


class Branch:
    """x ↦ inner(x W) V in enclosures, for linear maps W and V.

    Args:
        reads: matrices W, (D, …); of rows that continue a text only the first ``num_reads``.
        output: V, (inner, D).
    """

    num_reads = 1

    def __init__(self, reads: list[Tensor], output: Tensor) -> None:
        self.weights = [weight(w) for w in (*reads, output)]
        *self.reads, self.output = map(Matrix, self.weights)

    def write_from(self, first: int, width: int) -> None:
        """Write to the channels from ``first`` on, of so many in all."""
        last = width - first - self.output.middle.shape[-1]
        self.weights[-1] = self.weights[-1].map(lambda t: nn.functional.pad(t, (first, last)))
        self.output = Matrix(self.weights[-1])

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """The rows that V multiplies, (rows, inner), and the numbers that later rows need of them.

        z is x W, (rows, …), for every W. ``places`` are the positions of the rows, ``past`` is what
        was kept of the text that they continue; None if they are the text.
        """
        raise NotImplementedError


class FeedForwardBranch(Branch):
    """φ(Σ_l x_{i−l} W_l + b) V, W_0 for the own token.

    If V has one more row, that is added to every output.
    """

    def __init__(self, w_in: Tensor, b_in: Tensor, output: Tensor, activation: Activation) -> None:
        super().__init__(list(w_in.split(output.shape[-1], dim=-2)), output)
        self.b_in, self.has_bias = weight(b_in), len(output) > len(b_in)
        self.activation: Activation = activation

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """φ, and x_{i−l} W_l of every l ≥ 1."""
        if past is None:
            past = [part.map(partial(delay, lag=lag)) for lag, part in enumerate(z[1:], 1)]
        hidden = sum((part[places] for part in past), start=z[0] + self.b_in)
        found = activate(hidden, self.activation)
        return found.with_one() if self.has_bias else found, past


def activate(x: Enclosure, activation: Activation) -> Enclosure:
    """φ(x): |φ(x ± r) − φ(x)| ≤ r min(sup |φ′|, |φ′(x)| + r sup |φ″|).

    Of pairs only silu and relu are more accurate than in float64.
    """
    if isinstance(x, Pair) and activation == "silu":
        value: Enclosure = silu(x.exact())
    elif isinstance(x, Pair) and activation == "relu":
        value = x.exact().map(lambda t: t.masked_fill(x.middle <= 0, 0))
    else:
        x = x.single()
        middle = ACTIVATIONS[activation](x.middle)
        # In gelu, 1 + erf cancels.
        rounding = ACTIVATION_ERROR * size(x.middle if activation == "gelu" else middle)
        value = Enclosure(middle, rounding)
    if activation == "relu":  # which bends at zero
        slope = 1 - (x.middle.float() * (1 - 2.0**-22) + x.radius < 0).float()
    else:
        slope = activation_slope(activation, x.middle.float()).abs_().add_(SLOPE_ERROR)
        slope = slope.addcmul_(x.radius, x.radius.new_tensor(CURVATURE[activation]))
    moved = x.radius * slope.clamp_(max=SLOPE[activation])
    return replace(value, radius=outward(moved + value.radius))


def silu(x: Pair) -> Pair:
    """x/(1 + e^{−x}), of negative x as x eˣ/(1 + eˣ), which cannot overflow."""
    one = paired(constant(torch.ones_like(x.middle)))
    positive = x.middle > 0
    e = (x * constant(one.middle.where(~positive, -1))).exp()  # e^{−|x|}
    parts = zip((one.middle, one.radius, one.low), (e.middle, e.radius, e.low), strict=True)
    return x * Pair(*(of_one.where(positive, of_e) for of_one, of_e in parts)) / (one + e)


class AttentionBranch(Branch):
    """Σ_h (Σ_j P_ij v_j) G_h. Rows see the text before them, and themselves or a null token."""

    # (H, 1, 1), what logits are multiplied by.
    factor: Pair

    def __init__(
        self, reads: list[Tensor], position: VisibilityMask, output: Tensor, length: int
    ) -> None:
        if not position.is_causal:
            raise NotEnclosed("tokens see later ones, so that a beginning has no states of its own")
        super().__init__(reads, output)
        self.bias = weight(position(length)).middle

    def attended(
        self,
        logits: Enclosure,
        values: Enclosure,
        own: tuple[Enclosure, Enclosure] | None,
        places: Tensor,
        origin: Tensor,
    ) -> Enclosure:
        """softmax(factor · logits + bias)_h v_h of every row and head, (rows, H d).

        Args:
            logits: (H, rows, tokens), of the text.
            values: (H, tokens, d), of the text.
            own: logits, (H, rows, 1), and values, (H, rows, d), of rows that see themselves. Others
                see the tokens up to the one before them, each a place later behind a null token.
            places: of the rows.
            origin: (H, 1, d), what values are relative to.
        """
        count = logits.middle.shape[-1]
        tokens = torch.arange(count, device=places.device)
        bias = self.bias[:, places, :count]
        hidden = tokens > places[:, None] if own is None else tokens >= places[:, None]
        if own is not None:
            logits = logits.joined(own[0])
            bias = torch.cat([bias, self.bias[:, places, places, None]], -1)
            hidden = nn.functional.pad(hidden, (0, 1), value=False)
        hidden = hidden | bias.isneginf()
        factor = self.factor if isinstance(logits, Pair) else self.factor.single()
        scores = logits * factor + constant(bias.masked_fill(hidden, 0))
        highest = scores.middle.masked_fill(hidden, -math.inf).amax(-1, keepdim=True)
        weights = (scores - constant(highest)).exp().map(lambda t: t.masked_fill(hidden, 0))
        total = weights[..., :count].matmul(Matrix(values.with_one()))
        if own is not None:
            total = total + own[1].with_one() * weights[..., count:]
        means = total[..., :-1] / total[..., -1:]
        return (means + constant(origin)).map(merge_heads)


class L2AttentionBranch(AttentionBranch):
    """Tied L2 attention: the logits are −‖q_i − q_j‖²/√d = (q_i·q_j − ‖q_j‖²/2 − ‖q_i‖²/2) 2/√d."""

    def __init__(self, position: VisibilityMask, weights: L2Weights, length: int) -> None:
        reads, output = [merge_heads(weights.w_q)], weights.g.flatten(-3, -2)
        super().__init__(reads, position, output, length)
        self.num_heads, _, d_head = weights.w_q.shape
        quarter = constant(torch.full_like(weights.w_q[:1, :1, :1], d_head / 4))
        self.factor = paired(quarter).inverse_root()

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """Means of every row, and q relative to its mean."""
        q = z[0].map(lambda t: split_heads(t, self.num_heads))
        origin = q.middle.mean(-2, keepdim=True) if past is None else past[1]
        q = q - constant(origin)
        keys = (q if past is None else past[0])[:, : int(places.max()) + 1]
        exact, of_keys = q.exact(), keys.exact()
        half, their_half = (squares(part) for part in (exact, of_keys))
        right = of_keys.joined(their_half).map(lambda t: t.mT)
        # −‖q_i − q_j‖²/2 of the midpoints: where tokens are near one another, its terms cancel.
        behind = exact.with_one().matmul(Matrix(right), half)
        squared = (behind.radius - behind.middle.float()).clamp_(min=0)
        distance = squared.mul_(2 * enclosure.UP).sqrt_()
        error = length_up(q.radius).unsqueeze(-1) + length_up(keys.radius).unsqueeze(-2)
        spread = error.float() * (distance + error.float() / 2)
        logits = replace(behind, radius=outward(behind.radius + spread))
        own = logits[..., :1] * constant(behind.middle.new_zeros(())), q
        return self.attended(logits, keys, own, places, origin), past or (q, origin)


def squares(q: Enclosure) -> Enclosure:
    """−‖q‖²/2, as a column."""
    return -q.square_sum().map(lambda t: t.unsqueeze(-1) / 2)


class DotProductBranch(AttentionBranch):
    """Attention by dot products τ q·k, of projections in the unit ball if ``in_ball``.

    Strictly causal, rows do not see themselves.

    Args:
        w_qkv: (D, H d) each.
        temperature: τ, (H,).
        output: V, (H d, D).
    """

    def __init__(
        self,
        w_qkv: Sequence[Tensor],
        temperature: Pair,
        position: VisibilityMask,
        output: Tensor,
        length: int,
        in_ball: bool = False,
        strictly_causal: bool = False,
    ) -> None:
        super().__init__(list(w_qkv), position, output, length)
        self.factor = temperature.map(lambda t: t[:, None, None])
        self.in_ball, self.sees_itself = in_ball, not strictly_causal
        self.num_reads = 3 if self.sees_itself else 1

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """Means of every row, keys, and values relative to their mean."""
        heads = len(self.factor.middle)
        per_head = (part.map(lambda t: split_heads(t, heads)) for part in z)
        q, *kv = (part.into_ball(1.0) if self.in_ball else part for part in per_head)
        if past is None:
            k, v = kv if self.sees_itself else (part.map(delay) for part in kv)
            origin = v.middle.mean(-2, keepdim=True)
            past = k, v - constant(origin), origin
        *text, origin = past
        keys, values = (part[:, : int(places.max()) + 1] for part in text)
        logits = q.matmul(Matrix(keys.map(lambda t: t.mT)))
        own = None
        if self.sees_itself:
            k, v = kv
            own = (q * k).sum()[..., None], v - constant(origin)
        return self.attended(logits, values, own, places, origin), past


def enclosed_branch(name: str, branch: Any, length: int, weights: Any) -> Branch:
    """A branch in enclosures, with its weights, by its forward: a subclass may have another."""
    match type(branch).forward:
        case ContractiveFeedForward.forward:
            w_in, b_in, w_out, _ = weights
            return FeedForwardBranch(w_in, b_in, w_out, branch.activation)
        case FeedForward.forward:
            first, _, last = branch
            output = torch.cat([last.weight.mT, last.bias[None]])
            return FeedForwardBranch(first.weight.mT, first.bias, output, branch.activation)
        case TiedL2Attention.forward:
            return L2AttentionBranch(branch.position, weights or branch.weights(), length)
        case BoundedAttention.forward:
            w_qkv, temperature, g = weights
            return DotProductBranch(
                [merge_heads(w) for w in w_qkv],
                paired(weight(temperature)),
                branch.position,
                g.flatten(-3, -2),
                length,
                in_ball=True,
                strictly_causal=branch.strictly_causal,
            )
        case DotProductAttention.forward:
            w_qkv, heads = branch.qkv.weight.mT, branch.num_heads
            width = constant(w_qkv.new_full((heads,), w_qkv.shape[0] // heads))
            temperature = paired(width).inverse_root()  # 1/√d
            output = branch.out.weight.mT
            return DotProductBranch(
                w_qkv.chunk(3, -1), temperature, branch.position, output, length
            )
    raise NotEnclosed(f"{name}: the rounding of a {type(branch).__name__} is not bounded")


def weight(x: Tensor) -> Enclosure:
    """A weight, which has no error.

    NotEnclosed if a processor may read an entry as zero, or if one is above LARGEST.
    """
    if bool(((x.abs() > LARGEST) & x.isfinite()).any()):
        raise NotEnclosed(f"there are weights above {LARGEST:.2g}")
    if bool(is_denormal(x).any()):
        least = torch.finfo(x.dtype).tiny
        raise NotEnclosed(f"there are weights below {least:.2g}, which may be read as zero")
    return constant(x)
