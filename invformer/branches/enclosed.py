"""Residual branches in enclosures of real numbers."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from invformer.branches.nearby import UP, Rows, of_sum
from invformer.numerics.ball import into_ball
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

    # Whether there are formulas for :class:`.Rows`. Their lengths are measured after division by
    # ``units``, (inner,), those of x W by ``read_units``.
    has_rows = False
    units: Tensor | None = None
    read_units: Sequence[Tensor | None] = (None,)

    def remembered(self, past: Any) -> Any:
        """The text, as :meth:`nearby` takes it, from what :meth:`inner` has kept of it."""
        raise NotImplementedError

    def nearby(self, z: list[Rows], places: Tensor, past: Any) -> tuple[Rows, Tensor]:
        """As :meth:`inner` for rows that continue a text, and the lengths of what V multiplies."""
        raise NotImplementedError


class EnclosedAttention(EnclosedBranch):
    """Σ_h (Σ_j P_ij v_j) G_h. Rows see the text before them, and themselves or a null token."""

    # (H, 1, 1), what logits are multiplied by.
    factor: Pair

    sees_itself = True

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

    @cached_property
    def before(self) -> Tensor:
        """The bias of the text's tokens that a row sees beside itself, −∞ of others."""
        hidden = torch.ones_like(self.bias[0]).triu(0 if self.sees_itself else 1).bool()
        return self.bias.masked_fill(hidden, -math.inf)

    def scores_nearby(self, q: Tensor, keys: Tensor, places: Tensor) -> Tensor:
        """q·k + bias of rows with the text before them; the bias has H heads, or one for all."""
        return torch.baddbmm(self.before[:, places, : keys.shape[-2]], q, keys.mT)

    def attended_nearby(
        self, scores: Tensor, values: Tensor, own: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """As :meth:`attended`, by head and relative to the origin. ``scores`` are overwritten."""
        highest = scores.amax(-1, keepdim=True)
        if own is not None:
            highest = torch.maximum(highest, own[0])
        sums = scores.sub_(highest).exp_() @ nn.functional.pad(values, (0, 1), value=1.0)
        means, total = sums[..., :-1], sums[..., -1:]
        if own is not None:
            weight = (own[0] - highest).exp()
            means, total = means.addcmul(weight, own[1]), total + weight
        return means / total


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
        self.in_ball = self.has_rows = in_ball
        self.sees_itself = not strictly_causal
        self.num_reads = 3 if self.sees_itself else 1
        if in_ball:  # a head's numbers are measured by ‖T‖₂ (docs/numerics.md §16), roughly
            heads, tau = len(temperature.middle), temperature.middle[:, None]
            query, key, value = (split_heads(w.middle, heads) for w in self.weights[:3])
            parts = [tau[..., None] * query]
            if self.sees_itself:
                parts += [tau[..., None] / 2 * key, value]
            exponent = torch.linalg.matrix_norm(torch.cat(parts, -1)).log2().round()
            self.of_heads = exponent.clamp(-64, 64).nan_to_num(0).exp2()
            units = self.of_heads[:, None].expand(-1, value.shape[-1])
            self.units = units.flatten()
            self.read_units = [u.flatten() for u in (units / tau, 2 * units / tau, units)]

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

    def remembered(self, past: tuple[Enclosure, Enclosure, Tensor]) -> Any:
        """Midpoints, and how far they and all before may move the heads together, by token.

        With |q| < 1 and E‖v − Y‖² ≤ 1 keys and values move a head by at most max |dv| + τ |dk|.
        """
        (k, v), origin = (part.single() for part in past[:2]), past[2]
        off = length_up(v.radius) + self.factor.middle[..., 0] * length_up(k.radius)
        off = (off.cummax(-1).values / self.of_heads[:, None]).norm(dim=0) * UP
        return k.middle, v.middle, origin, off

    def nearby(self, z: list[Rows], places: Tensor, past: Any) -> tuple[Rows, Tensor]:
        """As :meth:`.EnclosedBranch.nearby`, by the theorem on diagonal blocks (§16).

        If only its own token moves, a head moves by at most ‖dz T‖, in the units of the reads the
        length of all dz together.
        """
        keys, values, origin, off = past
        last = int(places.max())
        keys, values = (part[:, : last + 1] for part in (keys, values))
        heads = len(keys)
        q, *kv = (into_ball(split_heads(part.value, heads), 1.0) for part in z)
        tau = self.factor.middle
        scores = self.scores_nearby(tau * q, keys, places)
        own = None
        if self.sees_itself:
            k, v = kv
            score = tau[..., 0] * torch.linalg.vecdot(q, k) + self.bias[:, places, places]
            own = score.unsqueeze(-1), v - origin
        # Of q, k and v, of their products, and of the bias.
        rounding = 4 * of_sum(q.shape[-1] + 16)
        error = rounding * (tau[..., 0] + self.largest_bias)
        longest = length_up(values).amax(-1, keepdim=True)
        if own is not None:
            longest = torch.maximum(longest, length_up(own[1]))
        of_sums = of_sum(scores.shape[-1] + 16)
        # P moves by a factor of at most e^{2δ} if scores move by δ.
        moved = ((2 * error + of_sums).expm1() + of_sums) * longest
        value = merge_heads(self.attended_nearby(scores, values, own).add_(origin))
        moved = (moved + rounding) / self.of_heads[:, None]
        error = torch.stack([part.error for part in z]).norm(dim=0) + moved.norm(dim=0) + off[last]
        assert self.units is not None
        return Rows(value, error * UP), length_up(value / self.units)


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
