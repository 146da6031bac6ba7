"""What attentions share: from the gains of heads to the constants of F(X)_i = Σ_h Y_i^h G_h.

Any positive weight per head gives a valid bound. A few choices are tried, the least is returned.
"""

import math
from operator import mul
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from invformer.numerics.rounding import product_up, quotient_up, round_up, sqrt_up, sum_up
from invformer.numerics.spectral_norm import spectral_norm_bound

# What is held at c: the Lipschitz constant in token_max, or the norms of the diagonal blocks.
AttentionCertificate = Literal["token_max", "causal"]
InputMaps = Float[Tensor, "*layers heads width d_head"]
OutputMaps = Float[Tensor, "*layers heads d_head width"]
# A number for every head of every layer; several such numbers to choose from in every layer.
OfHeads = list[list[float]]
Choices = list[list[list[float]]]


def head_width(d_model: int, num_heads: int) -> int:
    """Channels of a head; raises ValueError if heads do not divide the width."""
    if d_model % num_heads:
        raise ValueError(f"num_heads must divide d_model, got {num_heads} and {d_model}")
    return d_model // num_heads


def separate_inputs(gains: OfHeads, g: OutputMaps, sizes: OfHeads) -> list[float]:
    """‖Σ_h G_hᵀ y_h‖ ≤ min_w ‖[a_h G_h/w_h]_h‖₂ √(Σ_h w_h²) for all y_h with ‖y_h‖ ≤ a_h.

    Heads may move independently, because they may attend to different tokens. w_h = 1 gives
    √H ‖[a_h G_h]_h‖₂; w_h² = a_h ‖G_h‖₂, the ``sizes``, gives no more than Σ_h a_h ‖G_h‖₂.
    """
    choices: Choices = []
    for a, size in zip(gains, sizes, strict=True):
        by_size = [math.sqrt(x * out) for x, out in zip(a, size, strict=True)]
        choices.append([[1.0] * len(a), _usable(by_size)])
    totals = [[sqrt_up(sum_up(*map(product_up, w, w))) for w in tried] for tried in choices]
    return _least(_stacked_norms(_quotients(gains, choices), g, dim=-2), totals)


def shared_input(
    gains: OfHeads, w: Tensor, g: OutputMaps, known: OfHeads | None = None
) -> list[float]:
    """‖Σ_h G_hᵀ B_h W_hᵀ‖₂ ≤ min_s ‖[s_h G_h]_h‖₂ ‖[(a_h/s_h) W_h]_h‖₂ for all ‖B_h‖₂ ≤ a_h.

    All heads read one input: no √H. Tried are s_h = a_h ‖W_h‖₂, s_h² = a_h ‖W_h‖₂/‖G_h‖₂ and the
    weights ``known``.
    """
    inputs, outputs = spectral_norm_bound(w).tolist(), spectral_norm_bound(g).tolist()
    choices: Choices = []
    for layer, (a, q, size) in enumerate(zip(gains, inputs, outputs, strict=True)):
        before = list(map(mul, a, q))
        pairs = zip(before, size, strict=True)
        by_size = [math.sqrt(x / out) if out else math.inf for x, out in pairs]
        tried = [before, by_size, *([] if known is None else [known[layer]])]
        choices.append(list(map(_usable, tried)))
    after = _stacked_norms(choices, g, dim=-2)
    return _least(after, _stacked_norms(_quotients(gains, choices), w, dim=-1))


def bound_of_blocks(
    blocks: Float[Tensor, "*batch heads tokens tokens"],
    g: OutputMaps,
    measured: Literal["token_max", "frobenius", "diagonal_block"],
    tight: bool = False,
) -> Float[Tensor, "*batch"]:
    """‖J‖ at a text, from B_ij^h ≥ ‖∂Y_i/∂x_j‖₂ of every head, before rounding.

    token_max: ‖[b_h G_h]_h‖₂ max_i √(Σ_h (a_i^h/b_h)²) or max_i Σ_h a_i^h ‖G_h‖₂, whichever is
    smaller, with a_i^h = Σ_j B_ij^h and b_h = max_i a_i^h.
    diagonal_block: the same for ∂f_i/∂x_i, with a_i^h = B_ii^h.
    frobenius: ‖Σ_h ‖G_h‖₂ B^h‖₂ if ``tight``, else √(largest row sum · largest column sum) of that
    matrix.
    """
    sizes = spectral_norm_bound(g)[:, None]
    if measured == "frobenius":
        total = (blocks * sizes[..., None]).sum(-3)
        rows, columns = total.sum(-1).amax(-1), total.sum(-2).amax(-1)
        return spectral_norm_bound(total) if tight else (rows * columns).sqrt()
    diagonal = measured == "diagonal_block"
    gain = blocks.diagonal(dim1=-2, dim2=-1) if diagonal else blocks.sum(-1)
    worst = gain.amax(-1).clamp_min(torch.finfo(gain.dtype).tiny)
    summed = (gain * sizes).sum(-2).amax(-1)
    rows = (gain / worst.unsqueeze(-1)).square().sum(-2).amax(-1).sqrt()
    stacked = (worst[..., None, None] * g).flatten(-3, -2)
    return torch.minimum(summed, rows * spectral_norm_bound(stacked))


def _quotients(gains: OfHeads, choices: Choices) -> Choices:
    """a_h/w_h from above, for every choice of weights in every layer."""
    return [
        [list(map(quotient_up, a, w)) for w in tried]
        for a, tried in zip(gains, choices, strict=True)
    ]


def _least(a: list[list[float]], b: list[list[float]]) -> list[float]:
    """The least product a b among the choices of every layer, from above."""
    return [min(map(product_up, *of_layer)) for of_layer in zip(a, b, strict=True)]


def _stacked_norms(choices: Choices, blocks: Tensor, dim: int) -> list[list[float]]:
    """‖[a_h W_h]_h‖₂ from above for every choice of a in every layer, (layers, choices).

    Blocks are side by side (dim = −1) or one on the other (−2). Scaling rounds every entry by at
    most 2⁻⁵³ of itself, so it moves ‖·‖₂ by at most 2⁻⁵³ ‖·‖_F, which is at most 2⁻⁵³ √rank ‖·‖₂.
    """
    scale = blocks.new_tensor(choices, dtype=torch.float64)[..., None, None]
    joined = torch.cat((blocks.detach().to(torch.float64).unsqueeze(1) * scale).unbind(2), dim=dim)
    operations = 1 + math.isqrt(min(joined.shape[-2:]))
    norms = spectral_norm_bound(joined).tolist()
    return [[round_up(norm, operations) for norm in of_layer] for of_layer in norms]


def _usable(weights: list[float]) -> list[float]:
    """The weights, made positive and finite, within 1e250 of the largest finite one.

    A head with a tiny input map has an output map that was divided by it. Its weight is far below
    the others, and has to stay there.
    """
    largest = max((w for w in weights if 0 < w < math.inf), default=1.0)
    return [min(max(w, 1e-250 * largest), 1e250 * largest) for w in weights]
