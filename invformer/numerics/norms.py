"""The norms in which a Lipschitz constant can be stated; they are not comparable."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Norm = Literal["token_max", "frobenius", "entry_max"]
NORMS: tuple[Norm, ...] = get_args(Norm)


def vector_norm(x: Float[Tensor, "*batch tokens width"], norm: Norm) -> Float[Tensor, "*batch"]:
    """‖X‖ of each sequence: ``token_max`` = maxᵢ ‖xᵢ‖₂, ``frobenius``, ``entry_max`` = max |X_ik|.

    Args:
        x: sequences, one row per token.
        norm: which norm; a constant in one says nothing about a constant in another.

    Returns:
        One norm per sequence.

    Raises:
        ValueError: the norm is none of the three.
    """
    match norm:
        case "token_max":
            return torch.linalg.vector_norm(x, dim=-1).amax(-1)
        case "frobenius":
            return torch.linalg.vector_norm(x, dim=(-2, -1))
        case "entry_max":
            return x.abs().amax((-2, -1))
    raise ValueError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}")
