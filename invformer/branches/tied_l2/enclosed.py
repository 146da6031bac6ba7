"""Tied L2 attention in enclosures of real numbers."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from invformer.branches.enclosed import EnclosedAttention
from invformer.branches.heads import InputMaps, OutputMaps
from invformer.branches.nearby import UP, Rows, U, of_sum
from invformer.numerics import enclosure
from invformer.numerics.enclosure import Enclosure, Matrix, constant, length_up, outward
from invformer.numerics.l2_attention import merge_heads, split_heads
from invformer.numerics.pairs import paired
from invformer.weights.position_bias import VisibilityMask


class EnclosedL2Attention(EnclosedAttention):
    """Tied L2 attention: the logits are −‖q_i − q_j‖²/√d = (q_i·q_j − ‖q_j‖²/2 − ‖q_i‖²/2) 2/√d."""

    has_rows = True

    def __init__(
        self, w_q: InputMaps, g: OutputMaps, position: VisibilityMask, length: int
    ) -> None:
        super().__init__([merge_heads(w_q)], position, g.flatten(-3, -2), length)
        self.num_heads, _, d_head = w_q.shape
        quarter = constant(torch.full_like(w_q[:1, :1, :1], d_head / 4))
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

    def remembered(self, past: tuple[Enclosure, Tensor]) -> Any:
        """Keys relative to their mean, the mean, and the errors of every head's worst key so far.

        These are of all heads together, by token.
        """
        keys, origin = past[0].single(), past[1]
        off = length_up(keys.radius).cummax(-1).values.norm(dim=0) * UP
        return keys.middle, origin, off

    def nearby(self, z: list[Rows], places: Tensor, past: Any) -> tuple[Rows, Tensor]:
        """As :meth:`.EnclosedBranch.nearby`: a head moves by at most e (1 + 2 E‖q − k‖²/√d)."""
        keys, origin, off = past
        last = int(places.max())
        keys, off = keys[:, : last + 1], off[last]
        q = split_heads(z[0].value, self.num_heads) - origin  # (H, rows, d)
        squares = torch.linalg.vecdot(q, q)
        of_query = z[0].error + U * squares.sum(0).sqrt() * UP
        root = q.shape[-1] ** -0.5
        theirs = torch.linalg.vecdot(keys, keys)
        # Bias and logits plus ‖q_i‖²/√d: of others (2 q_i·q_j − ‖q_j‖²)/√d, in one product.
        left = nn.functional.pad(2 * root * q, (0, 1), value=-root)
        right = torch.cat([keys, theirs.unsqueeze(-1)], -1)
        scores = self.scores_nearby(left, right, places)
        own = squares.unsqueeze(-1) * root + self.bias[:, places, places, None]
        itself = own, torch.cat([q, squares.unsqueeze(-1)], -1)
        means = self.attended_nearby(scores, right, itself)
        value, mean_square = means[..., :-1], means[..., -1]
        far = (squares.sqrt() + theirs.amax(-1, keepdim=True).sqrt()) * UP  # ≥ ‖q_i − q_j‖
        # Of an exponential and of sums of products, relative; of scores; in all.
        rounding = of_sum(scores.shape[-1] + q.shape[-1] + 16)
        size = root * far.square() * UP + self.largest_bias
        rounded = 4 * of_sum(q.shape[-1] + 4) * size + rounding
        both = of_query + off
        moved = both * (2 * far + both) * root * UP + rounded
        # e^δ (E‖q − k‖²)^½
        apart = mean_square - 2 * torch.linalg.vecdot(q, value) + squares
        apart = (apart.clamp_(min=0) + 2 * rounding * far.square()).sqrt() + both
        apart *= moved.exp() * UP
        value = merge_heads(value + origin)
        size = length_up(value)
        moved = (rounded * apart + rounding * far).norm(dim=0)
        gain = 1 + 2 * root * apart.square().amax(0)
        rounding = 4 * U * (size + length_up(origin.flatten()))
        return Rows(value, (gain * both + moved + rounding) * UP), size


def squares(q: Enclosure) -> Enclosure:
    """−‖q‖²/2, as a column."""
    return -q.square_sum().map(lambda t: t.unsqueeze(-1) / 2)
