"""Proven local bounds of every branch at a probe's text, those of one kind together."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.branches.branch import LipschitzBranch
from invformer.branches.jacobian import Measured, StackedBranches
from invformer.lipschitz.probe import LipschitzProbe


@torch.no_grad()
def local_bounds(
    probe: LipschitzProbe,
    tight: bool = False,
    stacked: Sequence[StackedBranches] | None = None,
) -> Float[Tensor, "branches"]:
    """Upper bounds on what the probe estimates, the largest over the sequences, in float64.

    inf where none is known. Cost: a spectral norm of the size of a head for every token, in as many
    launches at any depth. ``tight`` spends an eigenproblem or a spectral norm of D × D
    matrices per token, branch by branch, unless that takes too long.
    """
    parts = stacked or probe.stacked()
    bounds = [at_text.local_bounds(probe.measured, tight).double() for at_text in parts]
    return torch.stack(bounds, -1).flatten()


def local_bound(
    branch: LipschitzBranch,
    x: Float[Tensor, "sequences tokens width"],
    measured: Measured,
    tight: bool = False,
) -> float:
    """The local bound of one branch at an input of its own, never above its Lipschitz bound."""
    alone = branch.stacked([branch], [branch.weights()], x.shape[-2])
    alone.forward(x)
    bound = alone.local_bounds(measured, tight).item()
    # What holds everywhere holds here.
    return bound if measured == "diagonal_block" else min(bound, branch.lipschitz_bound(measured))
