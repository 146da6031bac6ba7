"""Feed-forwards in enclosures of real numbers."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from invformer.branches.enclosed import EnclosedBranch, weight
from invformer.branches.feed_forward.activations import ACTIVATIONS, Activation, activation_slope
from invformer.branches.nearby import UP, Rows, U
from invformer.numerics.enclosure import Enclosure, constant, length_up, outward, size
from invformer.numerics.pairs import Pair, paired
from invformer.numerics.token_shift import delay

# Relative error assumed of the library's activations: 8 ulp.
ACTIVATION_ERROR = 2.0**-49
# ≥ sup |φ″|, and ≥ sup |φ′|.
CURVATURE = {"silu": 0.5001, "gelu": 0.7980, "relu": math.inf, "tanh": 0.7699}
SLOPE = {"silu": 1.0999, "gelu": 1.1290, "relu": 1.0, "tanh": 1.0}
# Covers the rounding of φ′ in float32.
SLOPE_ERROR = 2.0**-16


class EnclosedFeedForward(EnclosedBranch):
    """φ(Σ_l x_{i−l} W_l + b) V, W_0 for the own token.

    If V has one more row, that is added to every output.
    """

    has_rows = True

    def __init__(self, w_in: Tensor, b_in: Tensor, output: Tensor, activation: Activation) -> None:
        super().__init__(list(w_in.split(output.shape[-1], dim=-2)), output)
        self.b_in, self.has_bias = weight(b_in), len(output) > len(b_in)
        self.activation: Activation = activation
        # In which W and V are about as long for every hidden unit; powers of two.
        w, v = (x.middle for x in (self.weights[0], self.weights[-1]))
        balance = w.square().sum(0) / v[: w.shape[-1]].square().sum(-1)
        exponent = (balance.log2() / 4).round().clamp(-64, 64).nan_to_num(0)
        self.of_hidden = exponent.exp2()
        self.read_units = [self.of_hidden] * len(self.reads)
        self.units = nn.functional.pad(self.of_hidden, (0, self.has_bias), value=1.0)

    def inner(self, z: list[Enclosure], places: Tensor, past: Any) -> tuple[Enclosure, Any]:
        """φ, and x_{i−l} W_l of every l ≥ 1."""
        if past is None:
            past = [part.map(partial(delay, lag=lag)) for lag, part in enumerate(z[1:], 1)]
        hidden = sum((part[places] for part in past), start=z[0] + self.b_in)
        found = activate(hidden, self.activation)
        return found.with_one() if self.has_bias else found, past

    def remembered(self, past: list[Enclosure]) -> list[Rows]:
        """x_{i−l} W_l of every l ≥ 1."""
        return [Rows.of(part, self.of_hidden) for part in past]

    def nearby(self, z: list[Rows], places: Tensor, past: list[Rows]) -> tuple[Rows, Tensor]:
        """As :meth:`.EnclosedBranch.nearby`, by |φ(h)| ≤ |h| and sup |φ′|."""
        inverse = 1 / self.of_hidden
        hidden, error, size = z[0].value, z[0].error, z[0].error
        for part in (Rows(self.b_in.middle, torch.zeros_like(error[:1])), *past):
            rows = slice(None) if part.value.ndim == 1 else places
            hidden = hidden + part.value[rows]
            size = length_up(hidden * inverse)
            error = error + part.error[rows] + U * size
        value = ACTIVATIONS[self.activation](hidden)
        error = (SLOPE[self.activation] * error + ACTIVATION_ERROR * size) * UP
        if self.has_bias:
            value, size = nn.functional.pad(value, (0, 1), value=1.0), size + 1
        return Rows(value, error), size


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
