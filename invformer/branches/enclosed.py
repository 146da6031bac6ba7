"""Residual branches in enclosures of real numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from invformer.branches.nearby import UP, Rows, U, of_sum
from invformer.numerics.enclosure import Enclosure, Matrix, constant, length_up
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.pairs import Pair
from invformer.numerics.precision import is_denormal
from invformer.numerics.token_shift import delay
from invformer.weights.position_bias import VisibilityMask

# Up to here what may underflow in a radius, times anything, is below what is added to each.
LARGEST = 2.0**26


class NotEnclosed(ValueError):
    """The rounding of this network is not bounded; the message says why."""


class EnclosedBranch:
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

    # As :meth:`inner` for :class:`.Rows`, with the length of the rows that V multiplies; None if
    # only enclosures are known. Lengths are measured after division by ``units``, (inner,).
    nearby: Callable[..., tuple[Rows, Tensor, Any]] | None = None
    units: Tensor | None = None


class EnclosedAttention(EnclosedBranch):
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
        self.largest_bias = self.bias.masked_fill(self.bias.isneginf(), 0).abs().amax()

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

    def attended_nearby(
        self,
        logits: Tensor,
        error: Tensor,
        values: Rows,
        own: tuple[Tensor, Rows] | None,
        places: Tensor,
        origin: Tensor,
    ) -> tuple[Rows, Tensor]:
        """As :meth:`attended`, with the logits' largest error and size, (2, H, rows).

        P moves by a factor of at most e^{2δ} if scores move by δ. ``logits`` are overwritten.
        """
        count = logits.shape[-1]
        bias = self.bias[:, places, :count].masked_fill(
            torch.arange(count, device=places.device) >= places[:, None] + (own is None), -math.inf
        )
        scores = logits.add_(bias)
        highest = scores.amax(-1, keepdim=True)
        of_self = highest
        if own is not None:
            of_self = own[0] + self.bias[:, places, places, None]
            highest = torch.maximum(highest, of_self)
        weights = scores.sub_(highest).exp_()
        total, means = weights.sum(-1, keepdim=True), weights @ values.value
        longest, moved = length_up(values.value).amax(-1, keepdim=True), values.error.amax()
        if own is not None:
            weight = (of_self - highest).exp()
            total, means = total + weight, torch.addcmul(means, weight, own[1].value)
            longest = torch.maximum(longest, length_up(own[1].value))
            moved = torch.maximum(moved, own[1].error)
        delta, size = error
        delta = 2 * delta + 16 * U * (size + self.largest_bias) + of_sum(count + 16)
        of_heads = (delta.expm1() + of_sum(count + 16)) * longest + moved
        value = merge_heads((means / total).add_(origin))
        size = length_up(value)
        rounding = 4 * U * (size + length_up(origin.flatten()))
        return Rows(value, torch.linalg.vector_norm(of_heads, dim=0) * UP + rounding), size


class EnclosedDotProducts(EnclosedAttention):
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
