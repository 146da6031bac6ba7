"""Picard for maps that take every token by itself: a token that has arrived is left where it is.

Most tokens arrive some steps before the last one of their sequence does. What comes of it is only a
better start: the iteration proper, which sees whole sequences, has the verdict.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from invformer.numerics.error_bound import token_norm
from invformer.numerics.residual_equation import ResidualEquation

# Of the tolerance: it goes by ‖x̂‖, and ‖x‖ is known to a few percent after one step.
SAFETY = 0.8
# Below this share of tokens it pays to pick out those that are not there yet.
FEW = 0.8


class Start(NamedTuple):
    """The equation from where the tokens arrived, the steps there, and the largest rate seen."""

    equation: ResidualEquation
    num_steps: int
    observed_rate: Tensor


def approach(equation: ResidualEquation, most_steps: int) -> Start | None:
    """Picard steps, each of the tokens only that have not arrived.

    Args:
        equation: of a token-wise f with a global c, in a norm that is the largest of the tokens'.
        most_steps: how many at most.

    Returns:
        None if a token did not come nearer as fast as c says: rounding, an f with NaN, or a c that
        is wrong, which the iteration from the first start finds out.
    """
    c = equation.lipschitz_bound
    assert c is not None
    x, fx, r = equation.start, equation.value_at_start, equation.start_residual
    left = token_norm(r, equation.norm)
    rate = torch.zeros_like(equation.size_of_y)
    length = equation.size_of_y if equation.starts_at_y else equation.size(x)
    own, num_steps = False, 0
    while num_steps < most_steps:
        allowed = SAFETY * equation.margin * equation.tolerance(length)
        rows = (left > allowed[:, None]).flatten().nonzero().squeeze(1)
        if not len(rows):
            break
        num_steps += 1
        before = left
        if len(rows) > FEW * left.numel():
            x = x + r
            fx, r, residual = equation.look(x)
            left, own = token_norm(r, equation.norm), False
            moved = before.amax(-1).double()
            size = equation.largest_size(length, moved)
            length = equation.size(x)
            size = size + equation.largest_size(length, residual)
            rate = torch.maximum(rate, equation.observed_rate(moved, residual, size))
        else:
            if not own:  # the caller's tensors stay as they are
                x, fx, r = (t.clone(memory_format=torch.contiguous_format) for t in (x, fx, r))
            own, left = True, left.clone()
            _move(equation, rows, x, fx, r, left)
        # What did not move has not come nearer.
        if not bool(((left <= c * before) | (left <= allowed[:, None])).all()):
            return None
    return Start(replace(equation.from_start(x), f_start=fx), num_steps, rate)


def _move(
    equation: ResidualEquation, rows: Tensor, x: Tensor, fx: Tensor, r: Tensor, left: Tensor
) -> None:
    """A step of some tokens, counted through all samples, in place."""
    xs, fxs, rs = (t.view(-1, 1, t.shape[-1]) for t in (x, fx, r))
    moved = xs[rows] + rs[rows]
    value = equation.f(moved)
    remaining = (equation.y.reshape(xs.shape)[rows] - moved).sub_(value)
    xs[rows], fxs[rows], rs[rows] = moved, value, remaining
    left.view(-1)[rows] = token_norm(remaining, equation.norm).squeeze(1)
