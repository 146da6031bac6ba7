"""Residual branches in enclosures of real numbers."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from invformer.nn.attention import L2Weights, merge_heads, side_by_side, split_heads
from invformer.nn.feed_forward import (
    ACTIVATIONS,
    Activation,
    activation_slope,
)
from invformer.nn.position_bias import VisibilityMask
from invformer.numerics.enclosure import (
    ACTIVATION,
    UP,
    Enclosure,
    U,
    add,
    constant,
    divide,
    exp,
    into_ball,
    inverse_root,
    joined,
    length_up,
    matmul,
    matrix,
    multiply,
    negated,
    outward,
    size,
    square_sum,
    sum_last,
    with_one,
)
from invformer.numerics.precision import is_denormal
from invformer.numerics.token_shift import delay

# ≥ sup |φ″|, and ≥ sup |φ′|.
CURVATURE = {"silu": 0.5001, "gelu": 0.7980, "relu": math.inf, "tanh": 0.7699}
SLOPE = {"silu": 1.0999, "gelu": 1.1290, "relu": 1.0, "tanh": 1.0}
# Covers the rounding of φ′ in float32.
SLOPE_ERROR = 2.0**-16


class NotEnclosed(ValueError):
    """The rounding of this network is not bounded; the message says why."""


class Branch:
    """x ↦ inner(x W) V + b in enclosures, for linear maps W and V.

    Args:
        reads: matrices W, (D, …); of rows that continue a text only the first ``num_reads``.
        output: V, (inner, D).
        bias: b.
    """

    # What is done to the input first, token by token.
    prepare: Callable[[Enclosure], Enclosure] | None = None
    num_reads = 1

    def __init__(self, reads: list[Tensor], output: Tensor, bias: Tensor | None = None) -> None:
        self.weights = [constant(w) for w in (*reads, output)]
        self.terms = [] if bias is None else [constant(bias)]

    def make_matrices(self, split: bool) -> None:
        """Get ready to multiply, more accurately than in float64 if split."""
        self.split = split
        *self.reads, self.output = (matrix(w, split) for w in self.weights)

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """What V is multiplied by, (rows, inner), and what later rows need of these.

        Args:
            z: x W, (rows, …) for every W.
            places: (rows,), their positions.
            past: what was kept of the text they continue; None if the rows are the text.
        """
        raise NotImplementedError


def layer_norm(x: Enclosure, norm: nn.LayerNorm) -> Enclosure:
    """LayerNorm."""
    width = constant(torch.tensor(float(x.middle.shape[-1]), device=x.middle.device))
    mean = divide(sum_last(x), width).map(lambda t: t.unsqueeze(-1))
    centred = add(x, negated(mean))
    eps = constant(torch.tensor(norm.eps, dtype=torch.float64, device=x.middle.device))
    root = inverse_root(add(divide(square_sum(centred), width), eps))
    y = multiply(centred, root.map(lambda t: t.unsqueeze(-1)))
    return add(multiply(y, constant(norm.weight)), constant(norm.bias))


class FeedForwardBranch(Branch):
    """φ(Σ_l x_{i−l} W_l + b) V + b′, W_0 for the own token."""

    def __init__(
        self, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor | None, activation: Any
    ) -> None:
        require_normal(w_in, b_in, w_out, b_out)
        reads = [w.double() for w in w_in.split(w_out.shape[-1], dim=-2)]
        super().__init__(reads, w_out, b_out)
        self.b_in, self.activation = constant(b_in), activation

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """φ, and x_{i−l} W_l of every l ≥ 1."""
        if past is None:
            past = [delayed(part, lag) for lag, part in enumerate(z[1:], 1)]
        hidden = add(z[0], self.b_in)
        for part in past:
            hidden = add(hidden, part.map(lambda t: t[places]))
        return activate(hidden, self.activation), past


def activate(x: Enclosure, activation: Activation) -> Enclosure:
    """φ(x): |φ(x ± r) − φ(x)| ≤ r min(sup |φ′|, |φ′(x)| + r sup |φ″|)."""
    middle = ACTIVATIONS[activation](x.middle)
    if activation == "relu":  # which bends at zero
        slope = (x.middle.float() * (1 + 2.0**-22) + x.radius >= 0).float()
    else:
        slope = activation_slope(activation, x.middle.float()).abs_().add_(SLOPE_ERROR)
        slope = slope.addcmul_(x.radius, x.radius.new_tensor(CURVATURE[activation]))
    # In gelu, 1 + erf cancels.
    rounding = ACTIVATION * size(x.middle if activation == "gelu" else middle)
    return Enclosure(middle, outward(x.radius * slope.clamp_(max=SLOPE[activation]) + rounding))


class AttentionBranch(Branch):
    """Σ_h (Σ_j P_ij v_j) G_h. Rows see the text before them: themselves, or a null token, as well.

    Args:
        reads: what the projections multiply by.
        position: mask or bias.
        output: G of all heads, (H d, D).
        length: tokens of a text.
        strictly_causal: whether rows see the tokens up to the one before them, each a place later,
            and a null token in front, but not themselves.

    Raises:
        NotEnclosed: the mask is not causal.
    """

    def __init__(
        self,
        reads: list[Tensor],
        position: VisibilityMask,
        output: Tensor,
        length: int,
        strictly_causal: bool = False,
    ) -> None:
        if not position.is_causal:
            raise NotEnclosed("tokens see later ones, so that a beginning has no states of its own")
        bias = position(length).detach()
        require_normal(bias, output, *reads)
        super().__init__(reads, output)
        self.bias, self.strictly_causal = bias.double(), strictly_causal

    def attended(
        self,
        logits: Enclosure,
        own_logits: Enclosure | None,
        factor: Tensor,
        values: Enclosure,
        own_values: Enclosure | None,
        places: Tensor,
        origin: Tensor,
    ) -> Enclosure:
        """softmax(factor · logits + bias)_h v_h of every row and head, (rows, H d).

        Args:
            logits: (H, rows, tokens), of the text.
            own_logits: (H, rows, 1), of rows that see themselves.
            factor: (H, 1, 1), to a relative error of u.
            values: (H, tokens, d).
            own_values: (H, rows, d).
            places: of the rows.
            origin: (H, 1, d), what values are relative to.
        """
        count = logits.middle.shape[-1]
        tokens = torch.arange(count, device=places.device)
        bias = self.bias[:, places, :count]
        hidden = tokens > places[:, None] if self.strictly_causal else tokens >= places[:, None]
        if own_logits is not None:
            logits = joined(logits, own_logits)
            bias = torch.cat([bias, self.bias[:, places, places, None]], -1)
            hidden = nn.functional.pad(hidden, (0, 1), value=False)
        hidden = hidden | bias.isinf()
        scaled = logits.middle * factor
        scores = (scaled + bias).masked_fill_(hidden, -math.inf)
        highest = scores.amax(-1, keepdim=True)
        behind = scores - highest
        rounding = 4 * U * (size(scaled) + size(highest) + size(behind))
        radius = (logits.radius * size(factor) + rounding).masked_fill_(hidden, 0)
        weights = exp(Enclosure(behind, outward(radius)))
        total = matmul(weights.map(lambda t: t[..., :count]), matrix(with_one(values), self.split))
        if own_values is not None:
            total = add(
                total, multiply(with_one(own_values), weights.map(lambda t: t[..., count:]))
            )
        means = divide(total.map(lambda t: t[..., :-1]), total.map(lambda t: t[..., -1:]))
        return add(means, constant(origin)).map(merge_heads)


class L2AttentionBranch(AttentionBranch):
    """Tied L2 attention: the logits are −‖q_i − q_j‖²/√d = (q_i·q_j − ‖q_j‖²/2 − ‖q_i‖²/2) 2/√d."""

    def __init__(self, position: VisibilityMask, weights: L2Weights, length: int) -> None:
        reads, output = [side_by_side(weights.w_q)], weights.g.flatten(-3, -2)
        super().__init__(reads, position, output, length)
        self.num_heads, _, d_head = weights.w_q.shape
        self.factor = constant(torch.full_like(weights.w_q[:1, :1, :1], 4 / d_head)).middle.sqrt()

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """Means of every row, and q relative to its mean."""
        q = z[0].map(lambda t: split_heads(t, self.num_heads))
        origin = q.middle.mean(-2, keepdim=True) if past is None else past[1]
        q = add(q, constant(-origin))
        keys = (q if past is None else past[0]).map(lambda t: t[:, : int(places.max()) + 1])
        half, their_half = (squares(part) for part in (q, keys))
        exact = constant(q.middle), constant(keys.middle)
        right = joined(exact[1], their_half).map(lambda t: t.mT)
        # −‖q_i − q_j‖²/2 of the midpoints: where tokens are near one another, its terms cancel.
        behind = matmul(with_one(exact[0]), matrix(right), half)
        distance = (behind.radius - behind.middle.float()).clamp_(min=0).mul_(2 * UP).sqrt_()
        error = length_up(q.radius).unsqueeze(-1) + length_up(keys.radius).unsqueeze(-2)
        spread = error.float() * (distance + error.float() / 2)
        logits = Enclosure(behind.middle, outward(behind.radius + spread))
        own_logits = constant(torch.zeros_like(half.middle))
        y = self.attended(logits, own_logits, self.factor, keys, q, places, origin)
        return y, past or (q, origin)


def squares(q: Enclosure) -> Enclosure:
    """−‖q‖²/2 of midpoints, as a column."""
    return negated(square_sum(constant(q.middle)).map(lambda t: t.unsqueeze(-1) / 2))


class DotProductBranch(AttentionBranch):
    """Attention by dot products, of projections that may first be mapped into the unit ball."""

    def __init__(
        self,
        position: VisibilityMask,
        w_qkv: Tensor,
        output: Tensor,
        factor: Tensor,
        length: int,
        in_ball: bool = False,
        strictly_causal: bool = False,
    ) -> None:
        reads = list(w_qkv.tensor_split([w_qkv.shape[-1] // 3], -1))
        super().__init__(reads, position, output, length, strictly_causal)
        require_normal(factor)
        self.factor, self.in_ball = factor.detach().double()[:, None, None], in_ball
        self.num_reads = 1 if strictly_causal else 2

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """Means of every row, keys and values."""
        (q,) = self.projected(z[0], 1)
        sees_itself = not self.strictly_causal
        own = self.projected(z[1], 2) if len(z) == 2 else None
        if past is None:
            assert own is not None
            k, v = (delayed(part, 0 if sees_itself else 1) for part in own)
            past = k, v, v.middle.mean(-2, keepdim=True)
        upto = int(places.max()) + 1
        keys, values = (part.map(lambda t: t[:, :upto]) for part in past[:2])
        logits = matmul(q, matrix(keys.map(lambda t: t.mT), self.split))
        own_logits = own_values = None
        if own is not None and sees_itself:
            own_logits = sum_last(multiply(q, own[0])).map(lambda t: t.unsqueeze(-1))
            own_values = add(own[1], constant(-past[2]))
        values = add(values, constant(-past[2]))
        y = self.attended(logits, own_logits, self.factor, values, own_values, places, past[2])
        return y, past

    def projected(self, z: Enclosure, parts: int) -> tuple[Enclosure, ...]:
        """z of every head, in the unit ball if asked for: ``parts`` times (H, rows, d)."""
        heads = len(self.factor)
        z = z.map(lambda t: split_heads(t, parts * heads))
        z = into_ball(z, 1.0) if self.in_ball else z
        return tuple(Enclosure(*p) for p in zip(*(t.split(heads) for t in z), strict=True))


def delayed(x: Enclosure, lag: int) -> Enclosure:
    """x_{i−lag} at token i, zero before the first."""
    return x.map(lambda t: delay(t, lag))


def require_normal(*weights: Tensor | None) -> None:
    """Refuse weights that a processor may read as zero.

    Raises:
        NotEnclosed: there is one.
    """
    for weight in weights:
        if weight is not None and bool(is_denormal(weight).any()):
            least = torch.finfo(weight.dtype).tiny
            raise NotEnclosed(f"there are weights below {least:.2g}, which may be read as zero")
